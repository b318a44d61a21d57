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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tsdoc.kernels.host_pool import PAGE_SIZE
from tsdoc.kernels.kv import KEYS, VALUES, KVArray, KVPiece, UncheckedRows
from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.triton.page_digest import digests, page_sums

NUM_WORKERS = 12
STAGING_BYTES = 16 << 20
NUM_BUFFERS = 2  # of a worker
_NOWHERE = np.empty(0, dtype=np.int64)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copied:
    """Pages of K or V that nobody has checked.

    Attributes:
        rows: Where they are from.
        positions: Of their first tokens, sorted.
    """

    rows: UncheckedRows
    layer: int
    kind: int
    positions: npt.NDArray[np.int64]


class Transfer:
    """Copies between `pool` and pieces.

    Args:
        pool: K and V.
        device: The pool's.
        checks_there: Whether pages are checked after they have arrived: a GPU does that faster
            than threads that ask for the interpreter's lock after each page.
    """

    def __init__(
        self, pool: PagePool, device: torch.device, *, checks_there: bool | None = None
    ) -> None:
        self._pool = pool
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._checks_there = self._on_cuda if checks_there is None else checks_there
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="tsdoc-kv")
        self._local = threading.local()

    def load(self, pieces: Sequence[KVPiece], end: int) -> None:
        """Makes [0, end) resident, checking every page that is read.

        Raises:
            CorruptPageError: a page does not match its checksum; what was loaded before it stays.
        """
        pool = self._pool
        edges = [*range(pool.resident, end, LOAD_TOKENS), end]
        parts = []
        for first, last in itertools.pairwise(edges):
            copied: list[_Copied] = []
            parts.append((last, self._begin_load(pieces, first, last, copied), copied))
        try:
            for last, part, copied in parts:
                part.wait()
                self._confirm(copied)
                pool.resident = last
        except BaseException:
            for _, part, _ in parts:
                part.abandon()
            raise

    def _confirm(self, copied: Sequence[_Copied]) -> None:
        """Checks what has arrived, where it is.

        Raises:
            CorruptPageError: a page does not match its checksum.
        """
        if not copied:
            return
        pool = self._pool
        sums = [
            page_sums(
                (pool.keys, pool.values)[part.kind][part.layer],
                pool.page_table,
                torch.from_numpy(part.positions // PAGE_SIZE).to(self._device, torch.int32),
            )
            for part in copied
        ]
        rows = pool.keys[0]
        num_bytes = PAGE_SIZE * rows.shape[1] * rows.shape[2] * rows.dtype.itemsize
        found = digests(torch.cat(sums).cpu().numpy(), num_bytes)
        ends = np.cumsum([len(part.positions) for part in copied])
        for part, own in zip(copied, np.split(found, ends[:-1]), strict=True):
            part.rows.confirm(part.layer, part.kind, part.positions, own)

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

    def _begin_load(
        self, pieces: Sequence[KVPiece], start: int, end: int, copied: list[_Copied]
    ) -> Moving:
        return Moving(
            [
                self._workers.submit(self._load_rows, pieces, layer, kind, start, end, copied)
                for layer in range(len(self._pool.keys))
                for kind in (KEYS, VALUES)
            ]
        )

    def _load_rows(
        self,
        pieces: Sequence[KVPiece],
        layer: int,
        kind: int,
        start: int,
        end: int,
        copied: list[_Copied],
    ) -> None:
        lane = self._lane
        there = self._checks_there and not self._pool.on_host
        try:
            for piece, first, last in covering(pieces, start, end):
                rows, doubtful = piece.unchecked if there else None, [_NOWHERE]
                for begin, slots in self._steps(layer, kind, first, last):
                    staged, host = lane.stage(slots)
                    if rows is None:
                        piece.read(layer, kind, begin, host)
                    else:
                        doubtful.append(rows.copy(layer, kind, begin, host))
                    lane.copy(slots, staged)
                positions = np.concatenate(doubtful)
                if rows is not None and len(positions):
                    copied.append(_Copied(rows=rows, layer=layer, kind=kind, positions=positions))
        finally:
            lane.wait()

    def _save_rows(
        self,
        pieces: Sequence[KVPiece],
        layer: int,
        kind: int,
        start: int,
        end: int,
        ready: Callable[[], None],
    ) -> None:
        lane = self._lane
        with lane.stream():
            ready()
        for piece, first, last in covering(pieces, start, end):
            if not piece.on_host:
                continue
            for begin, slots in self._steps(layer, kind, first, last):
                staged, host = lane.stage(slots)
                lane.copy(staged, slots)
                lane.wait()
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

    @property
    def _lane(self) -> Lane:
        """The calling thread's."""
        if not hasattr(self._local, "lane"):
            self._local.lane = Lane(self._device)
        lane: Lane = self._local.lane
        return lane


class Lane:
    """One thread's stream and its pinned buffers: one is filled while the other's rows travel."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        # torch gives streams and events no types.
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_BUFFERS)]
        self._sent: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._turn = 0

    def stage(self, slots: torch.Tensor) -> tuple[torch.Tensor, KVArray]:
        """The next buffer in the shape of `slots`, as tensor and as array, free to be filled."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()
        num_bytes = slots.numel() * slots.dtype.itemsize
        if len(self._buffers[self._turn]) < num_bytes:
            size = max(STAGING_BYTES, num_bytes)
            self._buffers[self._turn] = torch.empty(
                size, dtype=torch.uint8, pin_memory=self._on_cuda
            )
        staged = self._buffers[self._turn][:num_bytes]
        tensor, array = staged.view(slots.dtype).view(slots.shape), staged.numpy()
        if slots.dtype == torch.float32:
            return tensor, array.view(np.float32).reshape(slots.shape)
        return tensor, array.view(np.uint16).reshape(slots.shape)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begins to copy from, or to, the buffer that was staged last."""
        with self.stream():
            target.copy_(source, non_blocking=self._on_cuda)
            if self._on_cuda:
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                self._sent[self._turn] = event

    def wait(self) -> None:
        """Returns once all copies have arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def stream(self) -> AbstractContextManager[object]:
        """Makes the thread's stream the current one."""
        if self._stream is None:
            return nullcontext()
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context


def covering(pieces: Sequence[KVPiece], start: int, end: int) -> list[tuple[KVPiece, int, int]]:
    """Pieces that hold positions of [start, end), each with its share of the range."""
    shares = [
        (piece, max(start, piece.start), min(end, piece.start + piece.capacity)) for piece in pieces
    ]
    return [(piece, first, last) for piece, first, last in shares if first < last]
