"""The key index: 16 bytes per key and KV head, by which candidates are found without reading keys.

A key's offset from the centre (the mean) of its layer's and KV head's keys is measured along 28
directions, and each coordinate is rounded to one of 16 steps. What is then left of the first four
is rounded to sixteenths of a step:

    code = floor(coordinate / step) + 8, within 0 … 15
    second code = floor(16 · (coordinate / step - (code - 7.5))) + 8, within 0 … 15

The directions are those that matter to scores, not to keys: with M the mean of q · qᵀ over queries
(`query_moment`) and C the keys' covariance, the error of q · k is least for the leading
eigenvectors u of M^½ · C · M^½. A coordinate is u · M^½ · offset, and gives M^-½ · u to the key.
A query's approximate scores are then products of codes with 32 weights, plus a constant.

Centre, directions and steps (the *basis*) come from M and from a sample of the keys of an *epoch*,
the first `epoch_end` tokens: they depend on those tokens and the model alone, not on what follows,
nor on how often the index was extended.

Two codes share a byte: of a KV page of 256 tokens, row r holds tokens r (low bits) and r + 128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

RANK = 32  # codes of a key; unused ones of small heads have weight 0
REFINED = 4  # leading directions that have two
DIRECTIONS = RANK - REFINED
LEVELS = 16
MIDDLE = LEVELS / 2 - 0.5  # the code of the centre: a code stands for the middle of its step
STEPS_PER_SIGMA = 1.6  # codes span five standard deviations: what is looked at lies far out
LEAST_ASKED = 0.2  # of the mean over directions: so much any direction is taken to be asked about
NO_KEY = LEVELS // 2 * (LEVELS + 1)  # both codes of a byte, where no key is: the centre's
PAGE = 256
HALF = PAGE // 2
FIRST_EPOCH = 8192
SAMPLE = 16_384  # keys a basis is found from, at most


QueryMoments = Callable[[int], torch.Tensor]
"""A layer's `query_moment`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexBasis:
    """Where keys are measured from, and along what, per KV head of one layer.

    Attributes:
        centre: [num_kv_heads, head_dim] float32.
        axes: [num_kv_heads, head_dim, RANK] float32, what one step of each code adds to a key: a
            query's products with these are its weights. Zeros where a code is not used.
        duals: [num_kv_heads, head_dim, RANK] float32; an offset's products with these count steps.
    """

    centre: torch.Tensor
    axes: torch.Tensor
    duals: torch.Tensor


def epoch_end(num_tokens: int) -> int:
    """Tokens whose keys give the basis of an index over `num_tokens`: a power of two of them."""
    if num_tokens <= FIRST_EPOCH:
        return num_tokens
    return 1 << (num_tokens.bit_length() - 1)


def sample_positions(num_tokens: int) -> torch.Tensor:
    """Positions of the keys that the basis of an index over `num_tokens` is found from."""
    end = epoch_end(num_tokens)
    return torch.arange(0, end, -(-end // SAMPLE))


def query_moment(queries: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """How much is asked about each direction: the mean of q · qᵀ, every head counting alike.

    Args:
        queries: [num_queries, num_qo_heads, head_dim], as they select.
        num_kv_heads: Heads of K.

    Returns:
        [num_kv_heads, head_dim, head_dim] float64 on the CPU, of trace head_dim.
    """
    head_dim = queries.shape[2]
    heads = queries.float().transpose(0, 1)
    moments = (heads.transpose(1, 2) @ heads).double().cpu()
    traces = moments.diagonal(dim1=1, dim2=2).sum(-1).clamp_min(1e-30)
    moments *= head_dim / traces[:, None, None]
    return moments.view(num_kv_heads, -1, head_dim, head_dim).mean(dim=1)


def _roots(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Square root of a moment, with at least LEAST_ASKED in every direction, and its inverse."""
    values, vectors = torch.linalg.eigh(moment)
    roots = (values.clamp_min(0) + LEAST_ASKED)[:, None].sqrt()
    return vectors * roots @ vectors.mT, vectors / roots @ vectors.mT


def find_basis(keys: torch.Tensor, moment: torch.Tensor | None = None) -> IndexBasis:
    """Finds the basis of `keys`.

    Args:
        keys: [num_keys, num_kv_heads, head_dim], without RoPE.
        moment: See `query_moment`; None if every direction is asked about alike.
    """
    sample = keys.float().transpose(0, 1)
    num_kv, num_keys, head_dim = sample.shape
    centre = sample.mean(dim=1)
    offsets = sample - centre[:, None]
    covariance = offsets.transpose(1, 2) @ offsets / max(num_keys, 1)
    # Small matrices: LAPACK in float64 gives the same directions on every device.
    if moment is None:
        moment = torch.eye(head_dim, dtype=torch.float64).expand(num_kv, -1, -1)
    root, inverse = _roots(moment)
    variances, vectors = torch.linalg.eigh(root @ covariance.double().cpu() @ root)
    rank, fine = min(DIRECTIONS, head_dim), min(REFINED, head_dim)
    sigmas = variances.flip(1)[:, None, :rank].clamp_min(0).sqrt()
    steps, vectors = (sigmas / STEPS_PER_SIGMA).clamp_min(1e-6), vectors.flip(2)[..., :rank]
    axes = torch.zeros(num_kv, head_dim, RANK, dtype=torch.float64)
    axes[..., :rank] = inverse @ vectors * steps
    axes[..., DIRECTIONS : DIRECTIONS + fine] = axes[..., :fine] / LEVELS
    duals = torch.zeros_like(axes)
    duals[..., :rank] = root @ vectors / steps
    duals[..., DIRECTIONS : DIRECTIONS + fine] = duals[..., :fine] * LEVELS
    axes, duals = (part.float().to(keys.device) for part in (axes, duals))
    return IndexBasis(centre=centre, axes=axes, duals=duals)


def encode(keys: torch.Tensor, basis: IndexBasis) -> torch.Tensor:
    """Codes [num_kv_heads, num_keys, RANK] uint8 of `keys` [num_keys, num_kv_heads, head_dim]."""
    offsets = keys.float().transpose(0, 1) - basis.centre[:, None]
    steps = torch.bmm(offsets, basis.duals)
    first, second = steps[..., :DIRECTIONS], steps[..., DIRECTIONS:]
    _to_codes(first)
    second.sub_(first[..., :REFINED] - MIDDLE, alpha=LEVELS)
    _to_codes(second)
    return steps.to(torch.uint8)


def _to_codes(steps: torch.Tensor) -> None:
    """Rounds in place."""
    steps.floor_().add_(LEVELS // 2).clamp_(0, LEVELS - 1)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """[num_kv_heads, num_pages · 128, RANK] uint8 of codes of whole pages (see the module)."""
    num_kv, _, rank = codes.shape
    low, high = codes.view(num_kv, -1, 2, HALF, rank).unbind(2)
    return (low | (high << 4)).view(num_kv, -1, rank)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The codes [num_kv_heads, num_pages · 256, RANK] that `pack` was given."""
    num_kv, _, rank = packed.shape
    pages = packed.view(num_kv, -1, HALF, rank)
    return torch.stack((pages & (LEVELS - 1), pages >> 4), dim=2).view(num_kv, -1, rank)


def build(
    read: Callable[[int, int], torch.Tensor],
    basis: IndexBasis,
    packed: torch.Tensor,
    start: int,
    end: int,
    *,
    step: int = 16_384,
) -> None:
    """Writes the codes of [start, end) into `packed`, page by page.

    Args:
        read: Returns the keys of a range, [num_keys, num_kv_heads, head_dim].
        basis: Of this layer.
        packed: [num_kv_heads, num_pages · 128, RANK] uint8, with room for page of `end`.
        start: First position; its page is written whole.
        end: Position after the last; codes behind it, on its page, are the centre's.
        step: Keys at a time, a multiple of the page.
    """
    for first in range(start - start % PAGE, end, step):
        last = min(first + step, end)
        codes = encode(read(first, last), basis)
        missing = -(last - first) % PAGE
        if missing:
            codes = torch.nn.functional.pad(codes, (0, 0, 0, missing), value=LEVELS // 2)
        rows = slice(first // 2, (last + missing) // 2)
        packed[:, rows] = pack(codes)


def query_weights(
    queries: torch.Tensor, axes: torch.Tensor, centre: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What codes are multiplied with, and what is added, to get a query's approximate scores.

    Args:
        queries: [num_queries, num_qo_heads, head_dim] float32, times whatever scores are scaled by.
        axes: Of the layer's basis.
        centre: Same.

    Returns:
        weights [num_queries, num_qo_heads, RANK] and offsets [num_queries, num_qo_heads], float32.
    """
    num_queries, num_heads, head_dim = queries.shape
    num_kv = centre.shape[0]
    grouped = queries.view(num_queries, num_kv, -1, head_dim)
    weights = grouped @ axes
    offsets = (grouped @ centre.unsqueeze(-1)).squeeze(-1)
    offsets = offsets - weights.sum(dim=-1) * MIDDLE
    return weights.reshape(num_queries, num_heads, RANK), offsets.reshape(num_queries, num_heads)


def approximate_scores(
    weights: torch.Tensor, offsets: torch.Tensor, packed: torch.Tensor
) -> torch.Tensor:
    """Scores [num_qo_heads, num_pages · 256] float32 of one query from the index alone."""
    num_kv = packed.shape[0]
    codes = unpack(packed).float()
    scores = torch.bmm(weights.view(num_kv, -1, RANK), codes.transpose(1, 2)).flatten(0, 1)
    return scores + offsets[:, None]
