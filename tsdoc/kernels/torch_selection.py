"""Selections on the CPU: scores of candidates, votes and top-k, or the key index where it helps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tsdoc.kernels.election import Election, Race
from tsdoc.kernels.index_terms import Room
from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.kv import KVPiece, LayerIndex
from tsdoc.kernels.piece_rows import PieceRows
from tsdoc.kernels.selection import ChunkRange, SelectionConfig, allowed_mask
from tsdoc.kernels.torch_index import select_by_index, votes_by_index
from tsdoc.kernels.torch_scores import TorchScores
from tsdoc.kernels.workers import Workers

SCORE_BYTES = 128 << 20  # scores held at a time


class TorchSelector:
    """Selects the tokens of one prompt's chunks.

    Args:
        rows: K and V of the prompt.
        scores: Scores them.
        config: Selection settings.
        election: Turns scores into selections.
        index: Finds candidates, where it has something stored.
        workers: Take parts of the index.
    """

    def __init__(
        self,
        rows: PieceRows,
        scores: TorchScores,
        config: SelectionConfig,
        election: Election,
        index: IndexWatch | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._room = Room(workers)
        self._rows = rows
        self._scores = scores
        self._config = config
        self._election = election
        self._index = index

    def select(
        self,
        layer: int,
        queries: torch.Tensor,
        ranges: Sequence[ChunkRange],
        allowed: Sequence[tuple[int, int]] | None,
    ) -> list[torch.Tensor]:
        """See `DeviceCache.select`."""
        if self._index is None:
            return self._select_exactly(layer, queries, ranges, allowed)
        chosen = []
        for query, around in zip(queries, ranges, strict=True):
            found = self._select_by_index(self._index, layer, query, around, allowed)
            if found is None:
                (found,) = self._select_exactly(layer, query.unsqueeze(0), [around], allowed)
            chosen.append(found)
        return chosen

    def _select_exactly(
        self,
        layer: int,
        queries: torch.Tensor,
        ranges: Sequence[ChunkRange],
        allowed: Sequence[tuple[int, int]] | None,
    ) -> list[torch.Tensor]:
        """See `select`: every candidate is scored."""
        config = self._config
        num_sets = self._rows.num_kv_heads if config.sets == "per_kv_head" else 1
        chosen: list[torch.Tensor | None] = [None] * len(ranges)
        scored: list[int] = []
        for at, r in enumerate(ranges):
            every = _every_candidate(r, allowed, config.top_k)
            # What is scored begins at n_init, since a chunk before it has no candidates.
            if every is None:
                scored.append(at)
            else:
                chosen[at] = every.expand(num_sets, -1)
        num_heads = queries.shape[1]
        longest = max((ranges[at].num_candidates for at in scored), default=0)
        batch = self.batch(num_heads, longest)
        for first in range(0, len(scored), batch):
            part = scored[first : first + batch]
            first_key, last_key = _bounds([ranges[at] for at in part], allowed)
            logits = self.score(layer, queries[part], first_key, last_key)
            some = [ranges[at] for at in part]
            found = self._choose(logits, first_key, last_key, some, allowed)
            for at, indices in zip(part, found, strict=True):
                chosen[at] = indices
        return [c for c in chosen if c is not None]

    def _select_by_index(
        self,
        watch: IndexWatch,
        layer: int,
        query: torch.Tensor,
        around: ChunkRange,
        allowed: Sequence[tuple[int, int]] | None,
    ) -> torch.Tensor | None:
        """Selection of one chunk through the pieces' indexes; None where it is not worth it."""
        covered = self._indexed(watch, layer, around.init_end, around.local_start)
        if covered is None:
            return None
        config, found_by = self._config, watch.config
        with self._room.leading():
            chosen = select_by_index(
                [(piece, index) for piece, _, _, index in covered],
                query * query.shape[-1] ** -0.5,
                around,
                allowed,
                partial(self._scores.score_rows, layer, query.unsqueeze(0)),
                top_k=config.top_k,
                num_candidates=found_by.num_candidates(config.top_k, around.num_candidates),
                room=self._room,
            )
        if allowed is None and watch.wants_sample(layer):
            (exact,) = self._select_exactly(layer, query.unsqueeze(0), [around], allowed)
            watch.note(layer, self._share(layer, query, around, chosen, exact))
        return chosen  # also then, so that an answer does not depend on what is sampled

    def _indexed(
        self, watch: IndexWatch, layer: int, start: int, end: int
    ) -> list[tuple[KVPiece, int, int, LayerIndex | None]] | None:
        """Pieces of [start, end), their shares of it, and indexes; None to score every key."""
        config, applies = self._config, watch.config.applies
        if not applies(config, end - start) or not watch.is_trusted(layer):
            return None
        covered = [
            (piece, first, last, piece.index(layer))
            for piece, first, last in self._rows.covering(start, end)
        ]
        num_indexed = sum(last - first for _, first, last, index in covered if index is not None)
        return covered if applies(config, num_indexed) else None

    def sum_votes(
        self, layer: int, queries: torch.Tensor, start: int, end: int, weights: torch.Tensor
    ) -> torch.Tensor:
        """See `TorchScores.sum_votes`; by the index where selections go by it."""
        covered = None
        if self._index is not None:
            covered = self._indexed(self._index, layer, start, end)
        if covered is None:
            return self._scores.sum_votes(layer, queries, start, end, weights)
        score = partial(self._scores.score_rows, layer)
        return votes_by_index(covered, queries, weights, score, room=self._room)

    def _share(
        self,
        layer: int,
        query: torch.Tensor,
        around: ChunkRange,
        chosen: torch.Tensor,
        exact: torch.Tensor,
    ) -> float:
        """The share of the votes for `exact` that `chosen` has; both [1, num_selected]."""
        start, end = around.init_end, around.local_start
        logits = self.score(layer, query.unsqueeze(0), start, end)
        ballots = torch.softmax(logits, dim=-1).sum(dim=(0, 1, 2))
        return float(ballots[chosen[0] - start].sum() / ballots[exact[0] - start].sum())

    def batch(self, num_heads: int, num_keys: int) -> int:
        """How many queries are scored at a time."""
        size = 4 * self._election.planned_heads(num_heads) * num_keys
        return max(1, SCORE_BYTES // max(size, 1))

    def score(self, layer: int, queries: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """See `TorchScores.score`."""
        return self._scores.score(layer, queries, start, end)

    def _choose(
        self,
        logits: torch.Tensor,
        start: int,
        last: int,
        ranges: Sequence[ChunkRange],
        allowed: Sequence[tuple[int, int]] | None,
    ) -> list[torch.Tensor]:
        """Votes and top-k of chunks.

        Args:
            logits: [num_kv_heads, num_chunks, group, keys of [start, last)].
            start: Position of the first key.
            last: Position after the last.
            ranges: One per chunk.
            allowed: Position ranges that may be selected.
        """
        races = []
        for row, around in enumerate(ranges):
            end = min(around.local_start, last)
            scores = logits[:, row, :, : self._num_scored(start, end)].flatten(0, 1)
            mask = allowed_mask(start, end, allowed)
            race = Race(scores=scores, start=start, mask=mask, num_candidates=end - start)
            races.append(race)
        return self._election.hold(races, self._config)

    def _num_scored(self, start: int, end: int) -> int:
        """How many of the keys [start, end) `score` gives scores of."""
        return end - start


def _every_candidate(
    around: ChunkRange, allowed: Sequence[tuple[int, int]] | None, most: int
) -> torch.Tensor | None:
    """All positions that a chunk may select, ascending; None where there are more than `most`."""
    first, last = _bounds([around], allowed)
    mask = allowed_mask(first, last, allowed)
    if mask is None:
        return torch.arange(first, last) if last - first <= most else None
    positions = mask.nonzero().squeeze(1) + first
    return positions if positions.numel() <= most else None


def _bounds(
    ranges: Sequence[ChunkRange], allowed: Sequence[tuple[int, int]] | None
) -> tuple[int, int]:
    """The keys [first, last) that must be scored for chunks which may select among `allowed`."""
    first, last = ranges[0].init_end, max(r.local_start for r in ranges)
    if allowed is not None:
        first = max(first, min((start for start, _ in allowed), default=last))
        last = max(first, min(last, max((end for _, end in allowed), default=first)))
    return first, last
