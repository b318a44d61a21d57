"""Moves K and V between pieces in host memory and the pool, beside the computation.

Worker threads copy through pinned buffers on streams of their own; pieces read into them and write
from them without holding the GIL. There K and V of a token lie side by side, as in a file; the
device takes them apart and puts them together, and makes checksums of the pages that have arrived.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tsdoc.kernels.host_pool import PAGE_SIZE
from tsdoc.kernels.kv import KVPiece, UncheckedRows
from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.staging import STAGING_BYTES
from tsdoc.kernels.transfer_lane import Lane
from tsdoc.kernels.triton.page_digest import can_digest, digests, page_sums

NUM_WORKERS = 12
_NOWHERE = np.empty(0, dtype=np.int64)
LOAD_TOKENS = 131_072  # become resident together; their order is that of the prompt
TASK_TOKENS = 65_536  # of one layer, that one worker loads: enough tasks to share out evenly


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
    """Pages that have arrived and that nobody has checked.

    Attributes:
        rows: Where they are from.
        positions: Of their first tokens, sorted.
    """

    rows: UncheckedRows
    layer: int
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
        wanted = self._on_cuda if checks_there is None else checks_there
        self._checks_there = wanted and can_digest(pool.keys[0])
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="tsdoc-kv")
        self._local = threading.local()
        self._ready = self._workers.submit(self._check_nothing)

    def wait_ready(self) -> None:
        """Returns once kernels can be launched: the first in a process takes half a second."""
        self._ready.result()

    def load(self, pieces: Sequence[KVPiece], end: int) -> None:
        """Makes [0, end) resident, checking every page that is read.

        Raises:
            CorruptPageError: a page does not match its checksum; what was loaded before it stays.
        """
        pool = self._pool
        parts = []
        for first, last in _spans(pool.resident, end, LOAD_TOKENS):
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

    def _check_nothing(self) -> None:
        """Launches the checksums' kernel, beside whatever else is loaded."""
        if self._on_cuda and self._checks_there:
            row = self._pool.keys[0].shape[1:]
            with torch.cuda.device(self._device):
                page = self._pool.keys[0].new_zeros(PAGE_SIZE, *row)
                first = torch.zeros(1, dtype=torch.int32, device=self._device)
                page_sums(page, page, first, first).cpu()

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
                pool.keys[part.layer],
                pool.values[part.layer],
                pool.page_table,
                torch.from_numpy(part.positions // PAGE_SIZE).to(self._device, torch.int32),
            )
            for part in copied
        ]
        found = digests(torch.cat(sums).cpu().numpy(), PAGE_SIZE * self._row_bytes)
        ends = np.cumsum([len(part.positions) for part in copied])
        for part, own in zip(copied, np.split(found, ends[:-1]), strict=True):
            part.rows.confirm(part.layer, part.positions, own)

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
                self._workers.submit(self._save_rows, pieces, layer, start, end, ready)
                for layer in range(len(self._pool.keys))
            ]
        )

    def _begin_load(
        self, pieces: Sequence[KVPiece], start: int, end: int, copied: list[_Copied]
    ) -> Moving:
        return Moving(
            [
                self._workers.submit(self._load_rows, pieces, layer, first, last, copied)
                for layer in range(len(self._pool.keys))
                for first, last in _spans(start, end, TASK_TOKENS)
            ]
        )

    def _load_rows(
        self, pieces: Sequence[KVPiece], layer: int, start: int, end: int, copied: list[_Copied]
    ) -> None:
        lane, pool = self._lane, self._pool
        there = self._checks_there and not pool.on_host
        keys, values = pool.keys[layer], pool.values[layer]
        try:
            for piece, first, last in covering(pieces, start, end):
                unchecked, doubtful = piece.unchecked if there else None, [_NOWHERE]
                with lane.stream():
                    for begin, slots in self._steps(first, last):
                        rows = lane.stage(slots.stop - slots.start)
                        if unchecked is None:
                            piece.read(layer, begin, rows.array)
                        else:
                            doubtful.append(unchecked.copy(layer, begin, rows.array))
                        lane.send(rows)
                        keys[slots].copy_(rows.keys)
                        values[slots].copy_(rows.values)
                positions = np.concatenate(doubtful)
                if unchecked is not None and len(positions):
                    copied.append(_Copied(rows=unchecked, layer=layer, positions=positions))
        finally:
            lane.wait()

    def _save_rows(
        self,
        pieces: Sequence[KVPiece],
        layer: int,
        start: int,
        end: int,
        ready: Callable[[], None],
    ) -> None:
        lane, pool = self._lane, self._pool
        keys, values = pool.keys[layer], pool.values[layer]
        with lane.stream():
            ready()
            for piece, first, last in covering(pieces, start, end):
                if not piece.on_host:
                    continue
                for begin, slots in self._steps(first, last):
                    rows = lane.stage(slots.stop - slots.start)
                    rows.keys.copy_(keys[slots])
                    rows.values.copy_(values[slots])
                    lane.fetch(rows)
                    piece.write(layer, begin, rows.array)

    @property
    def _row_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        keys = self._pool.keys[0]
        return 2 * math.prod(keys.shape[1:]) * keys.dtype.itemsize

    def _steps(self, start: int, end: int) -> Iterator[tuple[int, slice]]:
        """Splits [start, end) into what fits the staging buffer, cut between pages.

        Yields:
            The first position, and its and the following slots in the pool.
        """
        step = PAGE_SIZE * max(1, STAGING_BYTES // (PAGE_SIZE * self._row_bytes))
        for begin, stop, slot in self._pool.runs(start, end):
            first = begin
            while first < stop:
                last = min(first + step - first % PAGE_SIZE, stop)
                yield first, slice(slot + first - begin, slot + last - begin)
                first = last

    @property
    def _lane(self) -> Lane:
        """The calling thread's."""
        if not hasattr(self._local, "lane"):
            self._local.lane = Lane(self._pool, self._device)
        lane: Lane = self._local.lane
        return lane


def _spans(start: int, end: int, size: int) -> list[tuple[int, int]]:
    """Splits [start, end) at multiples of `size`."""
    edges = [start, *range((start // size + 1) * size, end, size), end]
    return list(itertools.pairwise(edges)) if start < end else []


def covering(pieces: Sequence[KVPiece], start: int, end: int) -> list[tuple[KVPiece, int, int]]:
    """Pieces that hold positions of [start, end), each with its share of the range."""
    shares = [
        (piece, max(start, piece.start), min(end, piece.start + piece.capacity)) for piece in pieces
    ]
    return [(piece, first, last) for piece, first, last in shares if first < last]
