"""Selection by the key index on the CPU: approximate votes, candidates, exact votes on these.

The softmax's normaliser has the exact terms of the candidates and the approximate ones of the
rest. Positions that no index covers (question, answer, conversation) are all candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tsdoc.kernels.index import (
    HALF,
    LEVELS,
    PAGE,
    RANK,
    build,
    find_basis,
    query_weights,
    sample_positions,
)
from tsdoc.kernels.kv import KVPiece, LayerIndex
from tsdoc.kernels.selection import ChunkRange, allowed_mask, top_indices

TILE_PAGES = 32
LOG2_E = math.log2(math.e)

ExactScores = Callable[[torch.Tensor], torch.Tensor]
"""Scaled scores [num_qo_heads, n] of the keys at positions [n], ascending."""


def make_layer_index(keys: torch.Tensor, moment: torch.Tensor | None = None) -> LayerIndex:
    """Makes one layer's index.

    Args:
        keys: [num_tokens, num_kv_heads, head_dim].
        moment: The layer's, see `tsdoc.kernels.index.query_moment`.
    """
    num_tokens, num_kv, _ = keys.shape
    basis = find_basis(keys[sample_positions(num_tokens)], moment)
    codes = torch.zeros(num_kv, -(-num_tokens // PAGE) * HALF, RANK, dtype=torch.uint8)
    build(lambda first, last: keys[first:last], basis, codes, 0, num_tokens)
    return LayerIndex(
        centre=basis.centre.numpy(),
        axes=basis.axes.numpy(),
        codes=codes.numpy(),
    )


class _Scores:
    """Approximate scores, times log2(e), of one query against one piece's index.

    Attributes:
        scores: [num_tiles, 2, num_qo_heads, TILE_PAGES · 128]: halves of pages apart, as packed.
        positions: [num_tiles, 2, TILE_PAGES · 128] int64.
    """

    def __init__(self, piece: KVPiece, index: LayerIndex, query: torch.Tensor) -> None:
        axes, centre = torch.tensor(index.axes), torch.tensor(index.centre)
        weights, self.offsets = (part[0] for part in query_weights(query[None], axes, centre))
        num_kv, num_rows, _ = index.codes.shape
        weights = weights.view(num_kv, -1, RANK)
        width = TILE_PAGES * HALF
        num_tiles = -(-num_rows // width)
        self.scores = torch.empty(num_tiles, 2, num_kv, weights.shape[1], width)
        for tile in range(num_tiles):
            rows = slice(tile * width, min((tile + 1) * width, num_rows))
            packed = torch.from_numpy(index.codes[:, rows].copy())
            count = packed.shape[1]
            for number, codes in enumerate((packed & (LEVELS - 1), packed >> 4)):
                out = self.scores[tile, number]
                target = out if count == width else out[..., :count]
                if count == width:
                    torch.bmm(weights, codes.float().transpose(1, 2), out=target)
                else:
                    target.copy_(torch.bmm(weights, codes.float().transpose(1, 2)))
        self.scores = self.scores.flatten(2, 3)
        page = torch.arange(num_tiles * TILE_PAGES).view(num_tiles, 1, TILE_PAGES, 1) * PAGE
        half = torch.arange(2).view(1, 2, 1, 1) * HALF
        line = torch.arange(HALF).view(1, 1, 1, HALF)
        self.positions = (page + half + line).view(num_tiles, 2, width) + piece.start

    def leave_out(self, around: ChunkRange, end: int, allowed: torch.Tensor | None) -> None:
        """Takes away what is no candidate, of this piece that ends at `end`.

        Args:
            around: The chunk's ranges.
            end: Position after the piece's last.
            allowed: Which positions of [init_end, local_start) may be selected.
        """
        last = min(end, around.local_start)
        outside = (self.positions < around.init_end) | (self.positions >= last)
        if allowed is not None:
            outside[~outside] = ~allowed[self.positions[~outside] - around.init_end]
        self.outside = outside
        for tile in outside.flatten(1).any(dim=1).nonzero().flatten().tolist():
            self.scores[tile].masked_fill_(outside[tile][:, None], -torch.inf)
        self.peak = self.scores.amax(dim=(0, 1, 3)) + self.offsets

    def exponentiate(self) -> torch.Tensor:
        """Turns scores into 2^(score - peak); returns their sums [num_qo_heads]."""
        floor = torch.where(self.peak.isfinite(), self.peak, 0.0)
        self.scores.sub_((floor - self.offsets)[:, None])
        torch.exp2(self.scores, out=self.scores)
        self.base = self.peak
        return self.scores.sum(dim=(0, 1, 3))

    def votes(self, lse: torch.Tensor) -> torch.Tensor:
        """Votes by position as packed [num_tiles, 2, width]; -1 for what is no candidate."""
        weights = torch.exp2(self.base - lse)
        summed = torch.matmul(weights, self.scores)
        return summed.masked_fill_(self.outside, -1.0)

    def mass(self, flat: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Shares [num_qo_heads] of each head's softmax that places `flat` (of `votes`) have."""
        num_tiles, _, _, width = self.scores.shape
        marks = torch.zeros(num_tiles * 2, width, 1)
        marks.view(-1)[flat] = 1.0  # a product with these is several times as fast as a gather
        sums = torch.bmm(self.scores.flatten(0, 1), marks).sum(dim=(0, 2))
        return sums * torch.exp2(self.base - lse)


def select_by_index(
    pieces: Sequence[tuple[KVPiece, LayerIndex | None]],
    query: torch.Tensor,
    around: ChunkRange,
    allowed: Sequence[tuple[int, int]] | None,
    exact_scores: ExactScores,
    *,
    top_k: int,
    num_candidates: int,
) -> torch.Tensor:
    """Selects one chunk's tokens; reads keys of candidates alone.

    Args:
        pieces: All that hold candidates, each with its index.
        query: [num_qo_heads, head_dim] float32, times 1 / sqrt(head_dim).
        around: The chunk's ranges.
        allowed: Position ranges that may be selected.
        exact_scores: Scores candidates.
        top_k: Tokens to select, at most.
        num_candidates: Tokens to score exactly, beside those that no index covers.

    Returns:
        Positions [1, num_selected], ascending.
    """
    mask = allowed_mask(around.init_end, around.local_start, allowed)
    bare = _bare_positions(pieces, around, mask)
    bare_scores = exact_scores(bare) * LOG2_E
    parts = []
    for piece, index in pieces:
        if index is not None:
            part = _Scores(piece, index, query * LOG2_E)
            part.leave_out(around, piece.start + piece.capacity, mask)
            parts.append(part)
    # Each head's log2-sum-exp2 of approximate terms, and of exact ones where nothing is indexed.
    terms = [part.exponentiate().log2() + part.base for part in parts]
    if bare.numel():
        terms.append(torch.logsumexp(bare_scores / LOG2_E, dim=-1) * LOG2_E)
    lse = torch.logsumexp(torch.stack(terms) / LOG2_E, dim=0) * LOG2_E
    found = [part.votes(lse).flatten() for part in parts]
    votes = torch.cat(found)
    count = min(num_candidates, int((votes >= 0).sum()))
    best = top_indices(votes, count)
    approximate = torch.zeros_like(lse)
    positions, first = [bare], 0
    for part, own in zip(parts, found, strict=True):
        here = best[(best >= first) & (best < first + own.numel())] - first
        approximate += part.mass(here, lse)
        positions.append(part.positions.flatten()[here])
        first += own.numel()
    candidates = torch.sort(torch.cat(positions)).values
    scores = exact_scores(candidates) * LOG2_E
    if bare.numel():
        approximate += torch.exp2(bare_scores - lse[:, None]).sum(dim=-1)
    exact = torch.exp2(scores - lse[:, None]).sum(dim=-1)
    lse = lse + torch.log2((1 - approximate).clamp_min(0) + exact)
    ballots = torch.exp2(scores - lse[:, None]).sum(dim=0)
    return candidates[top_indices(ballots, top_k)].unsqueeze(0)


def _bare_positions(
    pieces: Sequence[tuple[KVPiece, LayerIndex | None]],
    around: ChunkRange,
    allowed: torch.Tensor | None,
) -> torch.Tensor:
    """Candidates that no index covers, ascending."""
    ranges = [
        torch.arange(
            max(piece.start, around.init_end),
            max(around.init_end, min(piece.start + piece.capacity, around.local_start)),
        )
        for piece, index in pieces
        if index is None and piece.start < around.local_start
    ]
    bare = torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)
    return bare if allowed is None else bare[allowed[bare - around.init_end]]
