"""The `torch` backend on the CPU: K and V are read straight from memory-mapped pieces.

Arithmetic is float32 (a float32 GEMM beats a bfloat16 one on the CPUs measured); K and V are read
as stored and widened tile by tile, so that no copy of the cache is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tsdoc.kernels.attention import chunk_attention, mass_by_position
from tsdoc.kernels.election import Election, OwnElection, Race
from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.interface import Window
from tsdoc.kernels.kv import KEYS, VALUES, KVPiece
from tsdoc.kernels.piece_rows import PieceRows
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import (
    ChunkRange,
    SelectionConfig,
    allowed_mask,
    attended_positions,
    selection_query,
    token_queries,
)
from tsdoc.kernels.torch_index import select_by_index
from tsdoc.kernels.torch_scores import TorchScores
from tsdoc.kernels.torch_window import TorchWindows
from tsdoc.kernels.workers import Workers

SCORE_BYTES = 128 << 20  # scores held at a time


class Arrived:
    """See `Pending`: what is written to the pieces is there at once."""

    def wait(self) -> None:
        """See `Pending.wait`."""

    def abandon(self) -> None:
        """See `Pending.abandon`."""


class TorchBackend:
    """See `Backend`: the CPU; K and V stay in the pieces."""

    save_ahead = 0

    def __init__(
        self,
        *,
        num_kv_heads: int,
        election: Election | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self._num_kv_heads = num_kv_heads
        self._workers = workers or Workers()
        self._election = election or OwnElection(num_kv_heads, self._workers)

    def cache(
        self,
        pieces: Sequence[KVPiece],
        rope: RopeTable,
        config: SelectionConfig,
        index: IndexWatch | None = None,
    ) -> TorchCache:
        """See `Backend.cache`."""
        return TorchCache(
            pieces,
            rope,
            config,
            num_kv_heads=self._num_kv_heads,
            index=index,
            election=self._election,
            workers=self._workers,
        )


class TorchCache:
    """K and V of one prompt over `pieces`, on the CPU.

    Args:
        pieces: Cover the prompt from 0 on without gaps; the last ones may still be unwritten.
        rope: Table for all compact positions.
        config: Selection settings.
        num_kv_heads: Heads of K and V.
        index: Finds candidates, where it has something stored.
        election: Turns scores into selections; by default all heads are here.
        workers: Take the chunks of a block.
    """

    def __init__(
        self,
        pieces: Sequence[KVPiece],
        rope: RopeTable,
        config: SelectionConfig,
        *,
        num_kv_heads: int,
        index: IndexWatch | None = None,
        election: Election | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._rows = PieceRows(pieces, num_kv_heads)
        self._workers = workers or Workers()
        self._scores = TorchScores(self._rows, self._workers)
        self._windows = TorchWindows(self._rows, rope)
        self.rope = rope
        self._config = config
        self._index = index
        self._num_kv_heads = num_kv_heads
        self._election = election or OwnElection(num_kv_heads, self._workers)

    def load(self, end: int) -> None:
        """See `DeviceCache.load`: pieces are read, and checked, where they lie."""

    def save(self, start: int, end: int) -> Arrived:
        """See `DeviceCache.save`."""
        return Arrived()

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `DeviceCache.write`."""
        self._rows.write(layer, start, k, v)

    def selection_queries(self, q: torch.Tensor, ranges: Sequence[ChunkRange]) -> torch.Tensor:
        """See `DeviceCache.selection_queries`."""
        first = ranges[0].start
        parts = [q[r.start - first : r.end - first] for r in ranges]
        n_local = self._config.n_local
        tasks = [partial(selection_query, part, self.rope, n_local) for part in parts]
        return torch.stack(self._workers.run(tasks))

    def select(
        self,
        layer: int,
        queries: torch.Tensor,
        ranges: Sequence[ChunkRange],
        allowed: Sequence[tuple[int, int]] | None = None,
    ) -> list[torch.Tensor]:
        """See `DeviceCache.select`."""
        if self._index is not None and len(ranges) == 1:
            found = self._select_by_index(self._index, layer, queries[0], ranges[0], allowed)
            if found is not None:
                return [found]
        return self._select_exactly(layer, queries, ranges, allowed)

    def _select_exactly(
        self,
        layer: int,
        queries: torch.Tensor,
        ranges: Sequence[ChunkRange],
        allowed: Sequence[tuple[int, int]] | None,
    ) -> list[torch.Tensor]:
        """See `select`: every candidate is scored."""
        config = self._config
        num_sets = self._num_kv_heads if config.sets == "per_kv_head" else 1
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
        batch = self._batch(num_heads, longest)
        for first in range(0, len(scored), batch):
            part = scored[first : first + batch]
            first_key, last_key = _bounds([ranges[at] for at in part], allowed)
            logits = self._score(layer, queries[part], first_key, last_key)
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
        config, found_by = self._config, watch.config
        if not found_by.applies(config, around.num_candidates) or not watch.is_trusted(layer):
            return None
        covering = self._rows.covering(around.init_end, around.local_start)
        pieces = [(piece, piece.index(layer)) for piece, _, _ in covering]
        indexed = sum(b - a for (_, a, b), (_, i) in zip(covering, pieces, strict=True) if i)
        if not found_by.applies(config, indexed):
            return None
        scaled = query * query.shape[-1] ** -0.5
        chosen = select_by_index(
            pieces,
            scaled,
            around,
            allowed,
            lambda positions: self._scores.score_rows(layer, scaled, positions),
            top_k=config.top_k,
            num_candidates=found_by.candidates * config.top_k,
        )
        if allowed is None and watch.wants_sample():
            (exact,) = self._select_exactly(layer, query.unsqueeze(0), [around], allowed)
            watch.note(layer, self._share(layer, query, around, chosen, exact))
        return chosen  # also then, so that an answer does not depend on what is sampled

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
        logits = self._score(layer, query.unsqueeze(0), start, end)
        ballots = torch.softmax(logits, dim=-1).sum(dim=(0, 1, 2))
        return float(ballots[chosen[0] - start].sum() / ballots[exact[0] - start].sum())

    def soft_votes(self, layer: int, q: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """See `DeviceCache.soft_votes`."""
        queries = token_queries(q, self.rope, self._config.n_local)
        num_tokens, num_heads, _ = queries.shape
        has_say = torch.zeros(num_heads)
        has_say[self._election.real(torch.arange(num_heads))] = 1
        total = self._scores.sum_votes(layer, queries, start, end, has_say)
        return total / (num_tokens * self._election.num_heads(num_heads))

    def _batch(self, num_heads: int, num_keys: int) -> int:
        """How many queries are scored at a time."""
        size = 4 * self._election.planned_heads(num_heads) * num_keys
        return max(1, SCORE_BYTES // max(size, 1))

    def _score(self, layer: int, queries: torch.Tensor, start: int, end: int) -> torch.Tensor:
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
            scores = logits[:, row, :, : end - start].flatten(0, 1)
            mask = allowed_mask(start, end, allowed)
            race = Race(scores=scores, start=start, mask=mask, num_candidates=end - start)
            races.append(race)
        return self._election.hold(races, self._config)

    def attend_chunks(
        self,
        layer: int,
        q: torch.Tensor,
        selected: Sequence[torch.Tensor],
        ranges: Sequence[ChunkRange],
    ) -> torch.Tensor:
        """See `DeviceCache.attend_chunks`."""
        first = ranges[0].start
        tasks = [
            partial(self.attend, layer, q[r.start - first : r.end - first], chosen, r)
            for chosen, r in zip(selected, ranges, strict=True)
        ]
        if len(tasks) == 1:
            return tasks[0]()
        self._rows.open(layer)
        with self._workers.leading():
            return torch.cat(self._workers.run(tasks))

    def start_decode(
        self,
        position: int,
        *,
        theta: float | None,
        max_hits: int,
        allowed: Sequence[tuple[int, int]] | None,
    ) -> None:
        """See `DeviceCache.start_decode`: the host decides."""

    def attend(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> torch.Tensor:
        """See `DeviceCache.attend`."""
        k, v = self._gather_rotated(layer, selected, around, around.end)
        num_before = k.shape[1] - q.shape[0]
        heads = self.rope.rotate(q.float().transpose(0, 1), slice(num_before, k.shape[1]))
        return chunk_attention(heads, k, v, num_before=num_before).transpose(0, 1)

    def attention_mass(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> torch.Tensor:
        """See `DeviceCache.attention_mass`."""
        positions = attended_positions(selected, around, around.start)
        k, _ = self._gather_rotated(layer, selected, around, around.end)
        num_before = positions.shape[1]
        heads = self.rope.rotate(q.float().transpose(0, 1), slice(num_before, k.shape[1]))
        real = self._election.real
        if real(heads) is not heads:  # heads that have no say: one K, and one set, per head
            group = heads.shape[0] // k.shape[0]
            k = real(k.repeat_interleave(group, dim=0))
            positions = positions.expand(self._num_kv_heads, -1)
            positions = real(positions.repeat_interleave(group, dim=0))
            heads = real(heads)
        return mass_by_position(heads, k, positions, around.start)

    def open_window(self, layer: int, selected: torch.Tensor, around: ChunkRange) -> Window:
        """See `DeviceCache.open_window`."""
        return self._windows.open(layer, selected, around)

    def _gather_rotated(
        self, layer: int, selected: torch.Tensor, around: ChunkRange, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K, rotated to compact positions, and V of init, selected and [local_start, end)."""
        positions = attended_positions(selected, around, end)
        k, v = self.gather(layer, positions)
        return self.rope.rotate(k, slice(0, positions.shape[1])), v

    def gather(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at `positions` [num_sets, n], ascending: each [num_kv_heads, n, head_dim]."""
        gather = self._rows.gather
        return gather(layer, KEYS, positions), gather(layer, VALUES, positions)


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
