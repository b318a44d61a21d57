"""The key index: 16 bytes per key and KV head, by which candidates are found without reading keys.

Keys of one layer and KV head lie near a subspace. Their offsets from their centre (the mean) are
projected on their leading directions (PCA), and each coordinate is rounded to one of 16 steps:

    code = floor(direction · (key - centre) / step) + 8, within 0 … 15

A query's approximate scores are then products of codes with 32 weights, plus a constant. Centre,
directions and steps (the *basis*) come from a sample of the keys of an *epoch*, the first
`epoch_end` tokens: they depend on those tokens alone, not on what follows, nor on how often the
index was extended.

Two codes share a byte: of a KV page of 256 tokens, row r holds tokens r (low bits) and r + 128.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

RANK = 32  # directions kept; unused ones of small heads have weight 0
LEVELS = 16
STEPS_PER_SIGMA = 8 / 3  # codes span three standard deviations to either side
PAGE = 256
HALF = PAGE // 2
FIRST_EPOCH = 8192
SAMPLE = 16_384  # keys a basis is found from, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexBasis:
    """Where keys are measured from, and along what, per KV head of one layer.

    Attributes:
        centre: [num_kv_heads, head_dim] float32.
        axes: [num_kv_heads, head_dim, RANK] float32, directions of unit length; zeros beyond
            head_dim of them.
        steps: [num_kv_heads, RANK] float32, above 0.
    """

    centre: torch.Tensor
    axes: torch.Tensor
    steps: torch.Tensor

    @property
    def scaled_axes(self) -> torch.Tensor:
        """[num_kv_heads, head_dim, RANK]: a query's products with these are its weights."""
        return self.axes * self.steps[:, None]


def epoch_end(num_tokens: int) -> int:
    """Tokens whose keys give the basis of an index over `num_tokens`: a power of two of them."""
    if num_tokens <= FIRST_EPOCH:
        return num_tokens
    return 1 << (num_tokens.bit_length() - 1)


def sample_positions(num_tokens: int) -> torch.Tensor:
    """Positions of the keys that the basis of an index over `num_tokens` is found from."""
    end = epoch_end(num_tokens)
    return torch.arange(0, end, -(-end // SAMPLE))


def find_basis(keys: torch.Tensor) -> IndexBasis:
    """Finds the basis of `keys` [num_keys, num_kv_heads, head_dim], without RoPE."""
    sample = keys.float().transpose(0, 1)
    num_kv, num_keys, head_dim = sample.shape
    centre = sample.mean(dim=1)
    offsets = sample - centre[:, None]
    covariance = offsets.transpose(1, 2) @ offsets / max(num_keys, 1)
    # Small matrices: LAPACK in float64 gives the same directions on every device.
    variances, axes = torch.linalg.eigh(covariance.double().cpu())
    rank = min(RANK, head_dim)
    padded = torch.zeros(num_kv, head_dim, RANK, dtype=torch.float64)
    padded[..., :rank] = axes.flip(2)[..., :rank]
    sigmas = torch.ones(num_kv, RANK, dtype=torch.float64)
    sigmas[:, :rank] = variances.flip(1)[:, :rank].clamp_min(0).sqrt()
    steps = (sigmas / STEPS_PER_SIGMA).clamp_min(1e-6)
    return IndexBasis(
        centre=centre,
        axes=padded.float().to(keys.device),
        steps=steps.float().to(keys.device),
    )


def encode(keys: torch.Tensor, basis: IndexBasis) -> torch.Tensor:
    """Codes [num_kv_heads, num_keys, RANK] uint8 of `keys` [num_keys, num_kv_heads, head_dim]."""
    offsets = keys.float().transpose(0, 1) - basis.centre[:, None]
    scaled = torch.bmm(offsets, basis.axes / basis.steps[:, None])
    return scaled.floor_().add_(LEVELS // 2).clamp_(0, LEVELS - 1).to(torch.uint8)


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
        end: Position after the last; codes behind it, on its page, are 0.
        step: Keys at a time, a multiple of the page.
    """
    for first in range(start - start % PAGE, end, step):
        last = min(first + step, end)
        codes = encode(read(first, last), basis)
        missing = -(last - first) % PAGE
        if missing:
            codes = torch.nn.functional.pad(codes, (0, 0, 0, missing))
        rows = slice(first // 2, (last + missing) // 2)
        packed[:, rows] = pack(codes)


def query_weights(queries: torch.Tensor, basis: IndexBasis) -> tuple[torch.Tensor, torch.Tensor]:
    """What codes are multiplied with, and what is added, to get a query's approximate scores.

    Args:
        queries: [num_queries, num_qo_heads, head_dim] float32, times whatever scores are scaled by.
        basis: Of the layer.

    Returns:
        weights [num_queries, num_qo_heads, RANK] and offsets [num_queries, num_qo_heads], float32.
    """
    num_queries, num_heads, head_dim = queries.shape
    num_kv = basis.centre.shape[0]
    grouped = queries.view(num_queries, num_kv, -1, head_dim)
    weights = torch.einsum("ckgd,kdr->ckgr", grouped, basis.scaled_axes)
    offsets = torch.einsum("ckgd,kd->ckg", grouped, basis.centre)
    # A code stands for the middle of its step.
    offsets = offsets - weights.sum(dim=-1) * (LEVELS / 2 - 0.5)
    return weights.reshape(num_queries, num_heads, RANK), offsets.reshape(num_queries, num_heads)


def approximate_scores(
    weights: torch.Tensor, offsets: torch.Tensor, packed: torch.Tensor
) -> torch.Tensor:
    """Scores [num_qo_heads, num_pages · 256] float32 of one query from the index alone."""
    num_kv = packed.shape[0]
    codes = unpack(packed).float()
    scores = torch.bmm(weights.view(num_kv, -1, RANK), codes.transpose(1, 2)).flatten(0, 1)
    return scores + offsets[:, None]
