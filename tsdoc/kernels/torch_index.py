"""Selections and votes by the key index on the CPU.

The softmax's normaliser has the approximate terms of all keys that an index covers, and where
some of these are then scored exactly, exact terms instead of theirs. Positions that no index covers
(question, answer, conversation) are scored exactly at once. Where no more candidates are asked for
than are selected, approximate votes decide alone, and of indexed keys none is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from tsdoc.kernels.index import HALF, PAGE, RANK, build, find_basis, sample_positions
from tsdoc.kernels.index_terms import LOG2_E, IndexTerms, Room, Terms, log2_sum
from tsdoc.kernels.kv import KVPiece, LayerIndex
from tsdoc.kernels.selection import ChunkRange, allowed_mask, top_indices

VOTES_BYTES = 64 << 20  # terms held at a time while tokens vote
RUN = 16  # consecutive keys that are scored exactly then, or not
NUM_RUNS = 128  # of them

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


class BareTerms:
    """See `Terms`: of exact scores.

    Args:
        scores: [num_rows, n], scaled; -inf for what is no candidate.
    """

    def __init__(self, scores: torch.Tensor) -> None:
        self._scores = scores * LOG2_E
        self.lse = log2_sum(self._scores, dim=-1)

    def votes(self, shares: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """See `Terms.votes`."""
        return shares @ torch.exp2(self._scores - lse[:, None])

    def mass(self, at: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """See `Terms.mass`."""
        return torch.exp2(self._scores[:, at] - lse[:, None]).sum(dim=-1)


class _Joint:
    """Terms of consecutive parts together.

    Args:
        parts: Each behind the last.
        bounds: Where each begins, counted from the first one's first position, and the end.

    Attributes:
        lse: [num_rows], log2 of the sums of all terms.
    """

    def __init__(self, parts: Sequence[Terms], bounds: Sequence[int]) -> None:
        self._parts = parts
        self._bounds = torch.tensor(bounds)
        self.lse = parts[0].lse
        if len(parts) > 1:
            self.lse = log2_sum(torch.stack([part.lse for part in parts]), dim=0)

    def votes(self, shares: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """See `Terms.votes`."""
        votes = [part.votes(shares, lse) for part in self._parts]
        return votes[0] if len(votes) == 1 else torch.cat(votes)

    def settle(self, at: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts exact terms in the place of those at positions `at`, ascending.

        Args:
            at: [n], counted from the first position.
            scores: [num_rows, n], exact and scaled.

        Returns:
            Log2 of the sums of all terms then, and these terms as shares of them.
        """
        approximate = torch.zeros_like(self.lse)
        cuts = torch.searchsorted(at, self._bounds).tolist()
        starts = self._bounds.tolist()
        for part, start, low, high in zip(self._parts, starts, cuts, cuts[1:], strict=False):
            approximate += part.mass(at[low:high] - start, self.lse)
        exponents = scores * LOG2_E
        exact = torch.exp2(exponents - self.lse[:, None]).sum(dim=-1)
        lse = self.lse + torch.log2((1 - approximate).clamp_min(0) + exact)
        return lse, torch.exp2(exponents - lse[:, None])


def select_by_index(
    pieces: Sequence[tuple[KVPiece, LayerIndex | None]],
    query: torch.Tensor,
    around: ChunkRange,
    allowed: Sequence[tuple[int, int]] | None,
    exact_scores: ExactScores,
    *,
    top_k: int,
    num_candidates: int,
    room: Room | None = None,
) -> torch.Tensor:
    """Selects one chunk's tokens; of indexed keys it reads those of candidates alone, if any.

    Args:
        pieces: All that hold candidates, in order, each with its index.
        query: [num_qo_heads, head_dim] float32, times 1 / sqrt(head_dim).
        around: The chunk's ranges.
        allowed: Position ranges that may be selected.
        exact_scores: Scores candidates.
        top_k: Tokens to select, at most.
        num_candidates: Tokens to score exactly, if there are more than `top_k`.
        room: For what is computed of each key.

    Returns:
        Positions [1, num_selected], ascending.
    """
    first, last = around.init_end, around.local_start
    mask = allowed_mask(first, last, allowed)
    room = room or Room()
    room.clear()
    parts: list[Terms] = []
    bounds = [0]
    for piece, index in pieces:
        low, high = bounds[-1], min(piece.start + piece.capacity, last) - first
        inside = None if mask is None else mask[low:high]
        if index is None:
            scores = _bare_scores(exact_scores, low + first, high + first, inside, len(query))
            parts.append(BareTerms(scores))
        else:
            begin = first - piece.start
            parts.append(IndexTerms(index, query[None], low + begin, high + begin, inside, room))
        bounds.append(high)
    joint = _Joint(parts, bounds)
    votes = joint.votes(torch.ones_like(joint.lse), joint.lse)
    if mask is not None:
        votes.masked_fill_(~mask, -1.0)
    num_allowed = len(votes) if mask is None else int(mask.sum())
    best = top_indices(votes, min(max(num_candidates, top_k), num_allowed))
    if num_candidates > top_k:
        _, shares = joint.settle(best, exact_scores(best + first))
        best = best[top_indices(shares.sum(dim=0), top_k)]
    return (best + first).unsqueeze(0)


def votes_by_index(
    covered: Sequence[tuple[KVPiece, int, int, LayerIndex | None]],
    queries: torch.Tensor,
    weights: torch.Tensor,
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    room: Room,
) -> torch.Tensor:
    """See `TorchScores.sum_votes`: where most votes fall they are exact, elsewhere approximate.

    Args:
        covered: Pieces, positions [first, last) of each that are voted on, in order, and indexes.
        queries: [num_queries, num_qo_heads, head_dim].
        weights: [num_qo_heads], what each head's part is multiplied by.
        score: Of queries and positions; see `TorchScores.score_rows`.
        room: For what is computed of each key.
    """
    start, end = covered[0][1], covered[-1][2]
    bounds = [0, *(last - start for _, _, last, _ in covered)]
    total = torch.zeros(end - start)
    scale = queries.shape[-1] ** -0.5
    count = max(1, VOTES_BYTES // (4 * queries.shape[1] * (end - start)))
    for batch in torch.split(queries, count):
        room.clear()
        parts: list[Terms] = []
        num_kv = 1
        for piece, first, last, index in covered:
            if index is None:
                parts.append(BareTerms(score(batch, torch.arange(first, last))))
            else:
                num_kv = len(index.centre)
                low, high = first - piece.start, last - piece.start
                parts.append(IndexTerms(index, batch * scale, low, high, None, room))
        joint = _Joint(parts, bounds)
        shares = weights.view(num_kv, 1, -1).expand(-1, len(batch), -1).flatten()
        dense = _dense_positions(joint.votes(shares, joint.lse), start)
        lse, exact = joint.settle(dense, score(batch, dense + start))
        votes = joint.votes(shares, lse)
        votes[dense] = shares @ exact
        total += votes
    return total


def _dense_positions(votes: torch.Tensor, start: int) -> torch.Tensor:
    """Positions, from `start` on, of the runs of keys that have the most votes.

    Runs begin at multiples of RUN in the prompt, so that few of the store's units are read.
    """
    before = start % RUN
    padded = F.pad(votes, (before, -(before + len(votes)) % RUN))
    runs = top_indices(padded.view(-1, RUN).sum(dim=1), NUM_RUNS)
    at = (runs[:, None] * RUN + torch.arange(RUN)).flatten() - before
    return at[(at >= 0) & (at < len(votes))]


def _bare_scores(
    exact_scores: ExactScores,
    first: int,
    last: int,
    allowed: torch.Tensor | None,
    num_heads: int,
) -> torch.Tensor:
    """Scores [num_qo_heads, last - first]; -inf, and not read, where `allowed` says so."""
    if allowed is None:
        return exact_scores(torch.arange(first, last))
    at = allowed.nonzero().squeeze(1)
    scores = torch.full((num_heads, last - first), -torch.inf)
    scores[:, at] = exact_scores(at + first)
    return scores
