"""The mapped kv.bin of a segment: arrays of K and V, and where its pages lie in the file.

Reading a mapping whose file was cut, or whose disk fails, ends the process (SIGBUS). So a page is
first read with `pread`, which can fail in good order, and before every use the size of the file is
looked at. What remains is a file that somebody cuts in the milliseconds between that look and the
use, and a disk that fails on a page which was checked and then dropped from the page cache.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
from pathlib import Path

import numpy as np

from tsdoc.errors import DamagedStoreError
from tsdoc.kernels.kv import KVArray
from tsdoc.store.files import open_file, store_error
from tsdoc.store.journal import first_page
from tsdoc.store.key import PAGE_SIZE
from tsdoc.store.segment import SegmentFiles


class MappedSegment:
    """A segment's K and V, as they stand in the file.

    Args:
        files: What `inspect_segment` found; `reserved` must be true.
        writable: Map for writing; otherwise arrays are read-only.

    Raises:
        DamagedStoreError: kv.bin cannot be mapped.
    """

    def __init__(self, files: SegmentFiles, *, writable: bool) -> None:
        self.directory = files.directory
        self.info = files.info
        self.journal = files.journal
        self._fd, self._map = _map_file(self.path, files.info.kv_bytes, writable=writable)
        self._regions = self._cut()

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    @property
    def path(self) -> Path:
        """The file that is mapped."""
        return self.directory / "kv.bin"

    @property
    def num_pages(self) -> int:
        """KV pages of one layer."""
        return len(self.journal.block_end)

    def _cut(self) -> list[KVArray]:
        info, shape = self.info, self.info.shape
        rows = (info.end - info.start, 2, shape.num_kv_heads, shape.head_dim)
        regions: list[KVArray] = []
        for layer in range(shape.num_layers):
            flat: KVArray = np.frombuffer(
                self._map, shape.dtype, math.prod(rows), layer * info.region_bytes
            )
            regions.append(flat.reshape(rows))
        return regions

    def rows(self, layer: int) -> KVArray:
        """K and V of a layer, [capacity, 2 (K, V), num_kv_heads, head_dim]."""
        return self._regions[layer]

    @property
    def inode(self) -> int:
        """Of the file that is mapped."""
        return os.fstat(self._fd).st_ino

    def open_again(self) -> int:
        """Opens the file that is mapped once more, to read.

        Raises:
            DamagedStoreError: another file has its name.
            OSError: it cannot be opened.
        """
        fd = open_file(self.path, os.O_RDONLY)
        if os.fstat(fd).st_ino != self.inode:
            os.close(fd)
            raise DamagedStoreError("was replaced", where=str(self.path))
        return fd

    def flush(self) -> None:
        """Writes what was changed through the mapping to disk.

        Not by msync: Python's keeps the interpreter's lock meanwhile, and the threads that compute
        and fill the next block would stand still.
        """
        getattr(os, "fdatasync", os.fsync)(self._fd)  # macOS has the latter alone

    def check_size(self) -> None:
        """Raises DamagedStoreError when the file was cut since it was mapped."""
        size = self._map.size()
        if size < self.info.kv_bytes:
            raise DamagedStoreError(
                f"was cut to {size:,} of {self.info.kv_bytes:,} bytes while in use",
                where=str(self.path),
            )

    def bounds(self, page: int) -> tuple[int, int]:
        """Positions [first, last) that page number `page` of this segment holds."""
        first = (first_page(self.info.start) + page) * PAGE_SIZE
        return max(first, self.info.start), min(first + PAGE_SIZE, self.info.end)

    def read_page(self, layer: int, page: int) -> bytes:
        """The bytes of a page as it is now.

        Raises:
            DamagedStoreError: the file was cut.
            OSError: it cannot be read.
        """
        offset, size = self.info.place(layer, *self.bounds(page))
        data = os.pread(self._fd, size, offset)
        if len(data) < size:
            self.check_size()
        return data

    def fill(self, layer: int, start: int, out: KVArray) -> None:
        """Copies rows from position `start` on into `out`, as they are now.

        Raises:
            DamagedStoreError: the file was cut.
            OSError: they cannot be read.
        """
        view = out.data.cast("B")
        offset, _ = self.info.place(layer, start, start)
        while view:
            count = os.preadv(self._fd, [view], offset)
            if count == 0:
                self.check_size()
                raise DamagedStoreError("ends too early", where=str(self.path))
            view, offset = view[count:], offset + count

    def put(self, layer: int, start: int, rows: KVArray) -> None:
        """Writes rows from position `start` on.

        Raises:
            DiskFullError: the disk is full.
            StoreError: they cannot be written.
        """
        view = rows.data.cast("B")
        offset, _ = self.info.place(layer, start, start)
        try:
            while view:
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise store_error(error, self.path, "writing KV pages") from error

    def blank_unreadable(self, start: int, end: int) -> None:
        """Puts zeros where the disk cannot read [start, end), so that it can be written mapped.

        Raises:
            OSError: nor can it be written.
        """
        pages = self.journal.pages(start, end)
        for layer, page in itertools.product(
            range(self.info.shape.num_layers), range(pages.start, pages.stop)
        ):
            offset, size = self.info.place(layer, *self.bounds(page))
            try:
                os.pread(self._fd, size, offset)
            except OSError:
                os.pwrite(self._fd, bytes(size), offset)


def _map_file(path: Path, num_bytes: int, *, writable: bool) -> tuple[int, mmap.mmap]:
    """Opens and maps a file."""
    try:
        fd = open_file(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            if os.fstat(fd).st_size != num_bytes:
                raise DamagedStoreError("changed its size", where=str(path))
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            return fd, mmap.mmap(fd, num_bytes, access=access)
        except BaseException:
            os.close(fd)
            raise
    except (OSError, ValueError) as error:
        raise DamagedStoreError(f"cannot be mapped ({error})", where=str(path)) from error
