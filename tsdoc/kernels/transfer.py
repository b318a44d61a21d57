"""Moves K and V between pieces in host memory and the pool, beside the computation.

Worker threads copy through pinned buffers on streams of their own; pieces read into them and write
from them without holding the GIL.
On a CPU device (the kernels' interpreter) the same code copies directly.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from tsdoc.kernels.host_pool import PAGE_SIZE
from tsdoc.kernels.kv import KEYS, VALUES, KVArray, KVPiece
from tsdoc.kernels.page_pool import PagePool

NUM_WORKERS = 12
STAGING_BYTES = 16 << 20
LOAD_TOKENS = 131_072  # become resident together; their order is that of the prompt


class Moving:
    """A range of positions on its way."""

    def __init__(self, tasks: Sequence[Future[None]]) -> None:
        self._tasks = tasks

    def wait(self) -> None:
        """Returns once all of it has arrived.

        Raises:
            TsdocError: what writing to the pieces raised.
        """
        for task in self._tasks:
            task.result()

    def abandon(self) -> None:
        """Stops what has not begun and returns when nothing is written any more."""
        for task in self._tasks:
            task.cancel()
        wait(self._tasks)


class Transfer:
    """Copies between `pool` and pieces."""

    def __init__(self, pool: PagePool, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="tsdoc-kv")
        self._local = threading.local()

    def load(self, pieces: Sequence[KVPiece], end: int) -> None:
        """Makes [0, end) resident, checking every page that is read.

        Raises:
            CorruptPageError: a page does not match its checksum; what was loaded before it stays.
        """
        pool = self._pool
        edges = [*range(pool.resident, end, LOAD_TOKENS), end]
        parts = [
            (last, self._begin_load(pieces, first, last))
            for first, last in itertools.pairwise(edges)
        ]
        try:
            for last, part in parts:
                part.wait()
                pool.resident = last
        except BaseException:
            for _, part in parts:
                part.abandon()
            raise

    def save(self, pieces: Sequence[KVPiece], start: int, end: int) -> Moving:
        """Begins to copy [start, end), computed on the current stream, into pieces on the host."""
        if not any(piece.on_host for piece, _, _ in covering(pieces, start, end)):
            return Moving([])
        ready: Callable[[], None] = lambda: None  # noqa: E731
        if self._on_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
            event.record()
            # The worker's stream waits, nobody else; a copy within the host has no stream.
            ready = event.synchronize if self._pool.on_host else event.wait
        return Moving(
            [
                self._workers.submit(self._save_rows, pieces, layer, kind, start, end, ready)
                for layer in range(len(self._pool.keys))
                for kind in (KEYS, VALUES)
            ]
        )

    def _begin_load(self, pieces: Sequence[KVPiece], start: int, end: int) -> Moving:
        return Moving(
            [
                self._workers.submit(self._load_rows, pieces, layer, kind, start, end)
                for layer in range(len(self._pool.keys))
                for kind in (KEYS, VALUES)
            ]
        )

    def _load_rows(
        self, pieces: Sequence[KVPiece], layer: int, kind: int, start: int, end: int
    ) -> None:
        for piece, first, last in covering(pieces, start, end):
            for begin, slots in self._steps(layer, kind, first, last):
                staged, host = self._stage(slots)
                piece.read(layer, kind, begin, host)
                self._copy(slots, staged)

    def _save_rows(
        self,
        pieces: Sequence[KVPiece],
        layer: int,
        kind: int,
        start: int,
        end: int,
        ready: Callable[[], None],
    ) -> None:
        with self._stream():
            ready()
        for piece, first, last in covering(pieces, start, end):
            if not piece.on_host:
                continue
            for begin, slots in self._steps(layer, kind, first, last):
                staged, host = self._stage(slots)
                self._copy(staged, slots)
                piece.write(layer, kind, begin, host)

    def _steps(
        self, layer: int, kind: int, start: int, end: int
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Splits [start, end) into what fits the staging buffer, cut between pages.

        Yields:
            The first position, and its and the following slots of the pool's K or V.
        """
        pooled = (self._pool.keys, self._pool.values)[kind][layer]
        page_bytes = PAGE_SIZE * pooled[0].numel() * pooled.dtype.itemsize
        step = PAGE_SIZE * max(1, STAGING_BYTES // page_bytes)
        for begin, stop, slot in self._pool.runs(start, end):
            first = begin
            while first < stop:
                last = min(first + step - first % PAGE_SIZE, stop)
                yield first, pooled[slot + first - begin : slot + last - begin]
                first = last

    def _stage(self, slots: torch.Tensor) -> tuple[torch.Tensor, KVArray]:
        """The calling thread's host buffer in the shape of `slots`, as tensor and as array."""
        num_bytes = slots.numel() * slots.dtype.itemsize
        staging: torch.Tensor | None = getattr(self._local, "staging", None)
        if staging is None or len(staging) < num_bytes:
            size = max(STAGING_BYTES, num_bytes)
            staging = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_cuda)
            self._local.staging = staging
        staged = staging[:num_bytes]
        tensor, array = staged.view(slots.dtype).view(slots.shape), staged.numpy()
        if slots.dtype == torch.float32:
            return tensor, array.view(np.float32).reshape(slots.shape)
        return tensor, array.view(np.uint16).reshape(slots.shape)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies on the calling thread's stream and waits for it."""
        with self._stream():
            target.copy_(source, non_blocking=self._on_cuda)
            if self._on_cuda:
                torch.cuda.current_stream().synchronize()

    def _stream(self) -> AbstractContextManager[object]:
        """The calling thread's stream."""
        if not self._on_cuda:
            return nullcontext()
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # nor this
        context: AbstractContextManager[object] = torch.cuda.stream(self._local.stream)
        return context


def covering(pieces: Sequence[KVPiece], start: int, end: int) -> list[tuple[KVPiece, int, int]]:
    """Pieces that hold positions of [start, end), each with its share of the range."""
    shares = [
        (piece, max(start, piece.start), min(end, piece.start + piece.capacity)) for piece in pieces
    ]
    return [(piece, first, last) for piece, first, last in shares if first < last]
