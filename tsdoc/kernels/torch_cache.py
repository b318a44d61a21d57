"""The `torch` backend on the CPU: K and V are read straight from memory-mapped pieces.

Arithmetic is float32, but for the products of a chunk's attention where the decoder's are bfloat16;
K and V are read as stored and widened tile by tile, so that no copy of the cache is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from tsdoc.kernels.attention import chunk_attention, mass_by_position
from tsdoc.kernels.election import Election, OwnElection
from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.interface import Window
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.piece_rows import PieceRows
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import (
    ChunkRange,
    SelectionConfig,
    attended_positions,
    selection_query,
    token_queries,
)
from tsdoc.kernels.torch_scores import TorchScores
from tsdoc.kernels.torch_selection import TorchSelector
from tsdoc.kernels.torch_window import TorchWindows
from tsdoc.kernels.workers import Workers

T = TypeVar("T")


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
        dtype: torch.dtype = torch.float32,
        election: Election | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self._dtype = dtype
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
            dtype=self._dtype,
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
        dtype: Type of what a chunk's attention multiplies.
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
        dtype: torch.dtype = torch.float32,
        index: IndexWatch | None = None,
        election: Election | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._dtype = dtype
        self._rows = PieceRows(pieces, num_kv_heads)
        self._workers = workers or Workers()
        self._scores = TorchScores(self._rows, self._workers)
        self._windows = TorchWindows(self._rows, rope)
        self._election = election or OwnElection(num_kv_heads, self._workers)
        self._selector = TorchSelector(
            self._rows, self._scores, config, self._election, index, self._workers
        )
        self.rope = rope
        self._config = config
        self._num_kv_heads = num_kv_heads

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
        return self._selector.select(layer, queries, ranges, allowed)

    def soft_votes(self, layer: int, q: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """See `DeviceCache.soft_votes`."""
        queries = token_queries(q, self.rope, self._config.n_local)
        num_tokens, num_heads, _ = queries.shape
        has_say = torch.zeros(num_heads)
        has_say[self._election.real(torch.arange(num_heads))] = 1
        total = self._selector.sum_votes(layer, queries, start, end, has_say)
        return total / (num_tokens * self._election.num_heads(num_heads))

    def attend_chunks(
        self,
        layer: int,
        q: torch.Tensor,
        selected: Sequence[torch.Tensor],
        ranges: Sequence[ChunkRange],
    ) -> torch.Tensor:
        """See `DeviceCache.attend_chunks`."""
        tasks = by_chunk(partial(self.attend, layer), q, selected, ranges)
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
        heads, k, v = (rows.to(self._dtype) for rows in (heads, k, v))
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
        return self._rows.gather(layer, positions)


def by_chunk(
    attend: Callable[[torch.Tensor, torch.Tensor, ChunkRange], T],
    q: torch.Tensor,
    selected: Sequence[torch.Tensor],
    ranges: Sequence[ChunkRange],
) -> list[Callable[[], T]]:
    """A task per chunk: `attend` with its rows of `q`, what it selected, and its ranges."""
    first = ranges[0].start
    return [
        partial(attend, q[r.start - first : r.end - first], chosen, r)
        for chosen, r in zip(selected, ranges, strict=True)
    ]
