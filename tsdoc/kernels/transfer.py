"""Moves K and V between pieces in host memory and the pool, beside the computation.

Worker threads copy through pinned buffers on streams of their own; numpy copies release the GIL.
On a CPU device (the kernels' interpreter) the same code copies directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.torch_cache import as_tensor

NUM_WORKERS = 6
STAGING_BYTES = 16 << 20
LOAD_TOKENS = 65_536  # become resident together


class Saved:
    """A range of positions on its way to host memory."""

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
        while pool.resident < end:
            first, last = pool.resident, min(pool.resident + LOAD_TOKENS, end)
            layers = range(len(pool.keys))
            tasks = [
                self._workers.submit(self._load_layer, pieces, layer, first, last)
                for layer in layers
            ]
            try:
                Saved(tasks).wait()
            except BaseException:
                Saved(tasks).abandon()
                raise
            pool.resident = last

    def save(self, pieces: Sequence[KVPiece], start: int, end: int) -> Saved:
        """Begins to copy [start, end), computed on the current stream, into pieces on the host."""
        if not any(piece.on_host for piece, _, _ in covering(pieces, start, end)):
            return Saved([])
        ready: Callable[[], None] = lambda: None  # noqa: E731
        if self._on_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
            event.record()
            ready = event.wait  # the worker's stream waits, nobody else
        return Saved(
            [
                self._workers.submit(self._save_layer, pieces, layer, start, end, ready)
                for layer in range(len(self._pool.keys))
            ]
        )

    def _load_layer(self, pieces: Sequence[KVPiece], layer: int, start: int, end: int) -> None:
        for piece, first, last in covering(pieces, start, end):
            piece.check_keys(layer, first, last)
            piece.check_values(layer, np.arange(first, last, dtype=np.int64))
            inside = slice(first - piece.start, last - piece.start)
            for source, target in (
                (piece.keys(layer), self._pool.keys[layer]),
                (piece.values(layer), self._pool.values[layer]),
            ):
                self._copy(as_tensor(source[inside]), target, first, to_device=True)

    def _save_layer(
        self,
        pieces: Sequence[KVPiece],
        layer: int,
        start: int,
        end: int,
        ready: Callable[[], None],
    ) -> None:
        with self._stream():
            ready()
        for piece, first, last in covering(pieces, start, end):
            if not piece.on_host:
                continue
            inside = slice(first - piece.start, last - piece.start)
            for target, source in (
                (piece.keys(layer), self._pool.keys[layer]),
                (piece.values(layer), self._pool.values[layer]),
            ):
                self._copy(as_tensor(target[inside]), source, first, to_device=False)

    def _copy(
        self, host: torch.Tensor, pooled: torch.Tensor, start: int, *, to_device: bool
    ) -> None:
        """Copies `host` [n, ...], which begins at position `start`, to or from a pool tensor."""
        step = max(1, STAGING_BYTES // (host[0].numel() * pooled.dtype.itemsize))
        for begin, stop, slot in self._pool.runs(start, start + host.shape[0]):
            for first in range(begin, stop, step):
                last = min(first + step, stop)
                rows = host[first - start : last - start]
                slots = pooled[slot + first - begin : slot + last - begin]
                if not self._on_cuda:
                    (slots if to_device else rows).copy_(rows if to_device else slots)
                    continue
                staging = self._staging()[: rows.numel() * pooled.dtype.itemsize]
                staged = staging.view(pooled.dtype).view(rows.shape)
                with self._stream() as _:
                    if to_device:
                        staged.copy_(rows)
                        slots.copy_(staged, non_blocking=True)
                        torch.cuda.current_stream().synchronize()
                    else:
                        staged.copy_(slots, non_blocking=True)
                        torch.cuda.current_stream().synchronize()
                        rows.copy_(staged)

    def _staging(self) -> torch.Tensor:
        """The calling thread's pinned buffer."""
        if not hasattr(self._local, "staging"):
            self._local.staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        staging: torch.Tensor = self._local.staging
        return staging

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
