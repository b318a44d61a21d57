"""The `torch` backend on the CPU: K and V are read straight from memory-mapped pieces.

Arithmetic is float32 (a float32 GEMM beats a bfloat16 one on the CPUs measured); K and V are read
as stored and widened tile by tile, so that no copy of the cache is ever made.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tsdoc.kernels.attention import chunk_attention, mass_by_position
from tsdoc.kernels.election import Election, OwnElection, Race
from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.interface import Window
from tsdoc.kernels.kv import KEYS, VALUES, KVPiece
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
from tsdoc.kernels.torch_window import ROOM, TorchWindow
from tsdoc.kernels.workers import Workers

SCORE_BYTES = 128 << 20  # scores held at a time
VOTERS = 2  # tokens of a question whose scores each worker holds at a time: few stay in its cache
TILE_BYTES = 2 << 20  # keys widened to float32 at a time


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
        self._pieces = list(pieces)
        self._workers = workers or Workers()
        self.rope = rope
        self._config = config
        self._index = index
        self._num_kv_heads = num_kv_heads
        self._election = election or OwnElection(num_kv_heads, self._workers)
        self._scores = torch.empty(0)
        self._shared: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def load(self, end: int) -> None:
        """See `DeviceCache.load`: pieces are read, and checked, where they lie."""

    def save(self, start: int, end: int) -> Arrived:
        """See `DeviceCache.save`."""
        return Arrived()

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `DeviceCache.write`."""
        end = start + k.shape[0]
        for piece, first, last in self._covering(start, end):
            inside = slice(first - piece.start, last - piece.start)
            outside = slice(first - start, last - start)
            piece.check_keys(layer, first, last)  # not what is written now, but that there is room
            keys, values = self._rows(piece, layer)
            keys[inside], values[inside] = k[outside], v[outside]

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
        covering = self._covering(around.init_end, around.local_start)
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
            lambda positions: self._score_rows(layer, scaled, positions),
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

    def _score_rows(self, layer: int, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scores [num_qo_heads, n] of a scaled query and the keys at `positions` [n], ascending."""
        grouped = query.view(self._num_kv_heads, -1, query.shape[-1])
        scores = torch.empty(self._num_kv_heads, grouped.shape[1], positions.numel())
        for piece in self._pieces:
            bounds = torch.tensor([piece.start, piece.start + piece.capacity])
            first, last = torch.searchsorted(positions, bounds).tolist()
            if first < last:
                where = positions[first:last]
                piece.check_rows(layer, KEYS, where.numpy())
                keys = self._rows(piece, layer)[0][where - piece.start].float()
                scores[..., first:last] = torch.bmm(grouped, keys.permute(1, 2, 0))
        return scores.flatten(0, 1)

    def soft_votes(self, layer: int, q: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """See `DeviceCache.soft_votes`."""
        queries = token_queries(q, self.rope, self._config.n_local)
        num_tokens, num_heads, _ = queries.shape
        has_say = torch.zeros(num_heads)
        has_say[self._election.real(torch.arange(num_heads))] = 1
        size = min(self._batch(num_heads, end - start), VOTERS)
        parts = torch.split(queries, size)
        num_workers = min(self._workers.num_threads, len(parts))
        tasks = [
            partial(self._sum_votes, layer, parts[at::num_workers], start, end, has_say)
            for at in range(num_workers)
        ]
        with self._workers.leading():
            total = torch.stack(self._workers.run(tasks)).sum(dim=0)
        return total / (num_tokens * self._election.num_heads(num_heads))

    def _sum_votes(
        self,
        layer: int,
        parts: Sequence[torch.Tensor],
        start: int,
        end: int,
        has_say: torch.Tensor,
    ) -> torch.Tensor:
        """Votes [end - start] of the heads that have a say, of all `parts` one after the other."""
        total = torch.zeros(end - start)
        groups = has_say.view(self._num_kv_heads, 1, -1)
        room = torch.empty(parts[0].shape[:2].numel() * (end - start))
        for queries in parts:
            logits, tasks = self._score_tiles(layer, queries, start, end, room)
            _run_all(tasks)
            logits -= logits.amax(dim=-1, keepdim=True)
            sums = logits.exp_().sum(dim=-1)
            total += (groups / sums).flatten() @ logits.view(-1, end - start)
        return total

    def _batch(self, num_heads: int, num_keys: int) -> int:
        """How many queries are scored at a time."""
        size = 4 * self._election.planned_heads(num_heads) * num_keys
        return max(1, SCORE_BYTES // max(size, 1))

    def _score(self, layer: int, queries: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Scaled scores [num_kv_heads, num_queries, group, end - start] of keys [start, end).

        They are gone when the next ones are computed: fresh memory for each would cost more than
        the arithmetic on some machines.
        """
        count = queries.shape[0] * queries.shape[1] * (end - start)
        if self._scores.numel() < count:
            self._scores = torch.empty(count)
        logits, tasks = self._score_tiles(layer, queries, start, end, self._scores)
        count = min(self._workers.num_threads, len(tasks))
        shares = [partial(_run_all, tasks[at::count]) for at in range(count)]
        with self._workers.leading():
            self._workers.run(shares)
        return logits

    def _score_tiles(
        self, layer: int, queries: torch.Tensor, start: int, end: int, room: torch.Tensor
    ) -> tuple[torch.Tensor, list[Callable[[], None]]]:
        """What `_score` returns, as a part of `room`, and what fills it."""
        num_queries, num_heads, head_dim = queries.shape
        grouped = queries.view(num_queries, self._num_kv_heads, -1, head_dim).transpose(0, 1)
        rows = (grouped * head_dim**-0.5).reshape(self._num_kv_heads, -1, head_dim)
        logits = room[: rows.shape[:2].numel() * (end - start)]
        logits = logits.view(self._num_kv_heads, rows.shape[1], end - start)
        size = max(1, TILE_BYTES // (4 * self._num_kv_heads * head_dim))
        tasks: list[Callable[[], None]] = []
        for piece, first, last in self._covering(start, end):
            piece.check_keys(layer, first, last)
            keys, _ = self._rows(piece, layer)
            for tile in range(first, last, size):
                stop = min(tile + size, last)
                part = keys[tile - piece.start : stop - piece.start]
                tasks.append(
                    partial(_score_tile, rows, part, logits[..., tile - start : stop - start])
                )
        shaped = logits.view(self._num_kv_heads, num_queries, num_heads // self._num_kv_heads, -1)
        return shaped, tasks

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
        for piece in self._pieces:  # not in threads: this touches the process's warning filters
            self._rows(piece, layer)
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
        positions = attended_positions(selected, around, around.start)
        length = positions.shape[1]

        def gather_keys() -> torch.Tensor:
            k = self._gather(layer, KEYS, positions)
            room = k.new_empty(k.shape[0], length + ROOM, k.shape[2])
            self.rope.rotate(k, slice(0, length), out=room[:, :length])
            return room

        gather_values = partial(self._gather, layer, VALUES, positions, ROOM)
        tasks: list[Callable[[], torch.Tensor]] = [gather_keys, gather_values]
        for piece in self._pieces:  # not in threads: this touches the process's warning filters
            self._rows(piece, layer)
        with self._workers.leading():
            k, v = self._workers.run(tasks)
        return TorchWindow(partial(self.gather, layer), self.rope, k, v, length)

    def _gather_rotated(
        self, layer: int, selected: torch.Tensor, around: ChunkRange, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K, rotated to compact positions, and V of init, selected and [local_start, end)."""
        positions = attended_positions(selected, around, end)
        k, v = self.gather(layer, positions)
        return self.rope.rotate(k, slice(0, positions.shape[1])), v

    def gather(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at `positions` [num_sets, n], ascending: each [num_kv_heads, n, head_dim]."""
        return self._gather(layer, KEYS, positions), self._gather(layer, VALUES, positions)

    def _gather(
        self, layer: int, kind: int, positions: torch.Tensor, room: int = 0
    ) -> torch.Tensor:
        """Rows at `positions` of K or V, as `gather` has them, before `room` unwritten ones."""
        num_sets, count = positions.shape
        head_dim = self._rows(self._pieces[0], layer)[kind].shape[-1]
        out = torch.empty(self._num_kv_heads, count + room, head_dim)
        heads_per_set = self._num_kv_heads // num_sets
        for piece in self._pieces:
            bounds = torch.tensor([piece.start, piece.start + piece.capacity])
            rows = self._rows(piece, layer)[kind]
            for number, row in enumerate(positions):
                first, last = torch.searchsorted(row, bounds).tolist()
                if first == last:
                    continue
                where = row[first:last]
                piece.check_rows(layer, kind, where.numpy())
                heads = slice(number * heads_per_set, (number + 1) * heads_per_set)
                found = rows[:, heads].index_select(0, where - piece.start)
                out[heads, first:last].copy_(found.transpose(0, 1))
        return out

    def _rows(self, piece: KVPiece, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a piece as tensors [capacity, num_kv_heads, head_dim] on its own memory."""
        key = (piece.start, layer)
        if key not in self._shared:
            self._shared[key] = (as_tensor(piece.keys(layer)), as_tensor(piece.values(layer)))
        return self._shared[key]

    def _covering(self, start: int, end: int) -> list[tuple[KVPiece, int, int]]:
        """Pieces that hold positions of [start, end), each with its share of the range."""
        shares = [
            (piece, max(start, piece.start), min(end, piece.start + piece.capacity))
            for piece in self._pieces
        ]
        return [(piece, first, last) for piece, first, last in shares if first < last]


def _run_all(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        task()


def _score_tile(rows: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
    """Puts `rows` [num_kv_heads, num_rows, head_dim] times `keys` [num_keys, …] into `out`."""
    out.copy_(torch.bmm(rows, keys.float().permute(1, 2, 0)))


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


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Shares memory with `array`; uint16 holds bfloat16 bit patterns."""
    with warnings.catch_warnings():
        # Committed pages are mapped read-only, and nothing here writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
