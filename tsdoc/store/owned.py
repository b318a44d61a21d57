"""A segment that this process writes: locked, reserved, committed block by block."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tsdoc.store.files import fsync_dir, open_file, reserve, store_error
from tsdoc.store.journal import journal_header, journal_record
from tsdoc.store.key import PAGE_SIZE
from tsdoc.store.locks import lock_exclusive
from tsdoc.store.pages import Segment
from tsdoc.store.segment import inspect_segment

HASH_THREADS = 4


class OwnSegment:
    """A segment that this process may write: locked, reserved, mapped, its journal open.

    Raises:
        DiskFullError: the disk has no room.
        StoreError: the store cannot be written, or the segment is damaged.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "write.lock"
        try:
            self._lock = lock_exclusive(path)
        except OSError as error:
            raise store_error(error, path, "locking the segment") from error
        self._journal = -1
        try:
            self._open(directory)
        except OSError as error:
            self.close()
            raise store_error(error, directory, "opening the segment for writing") from error
        except BaseException:
            self.close()
            raise

    def _open(self, directory: Path) -> None:
        files = inspect_segment(directory)
        info = files.info
        if not files.reserved:
            fd = open_file(directory / "kv.bin", os.O_RDWR | os.O_CREAT)
            try:
                if os.fstat(fd).st_size > info.kv_bytes:
                    os.ftruncate(fd, info.kv_bytes)
                reserve(fd, info.kv_bytes, directory / "kv.bin")
            finally:
                os.close(fd)
            files = replace(files, reserved=True)
        self._journal = open_file(directory / "journal.bin", os.O_RDWR | os.O_CREAT)
        header = journal_header(info.segment_id)
        if os.fstat(self._journal).st_size < len(header):
            append(self._journal, 0, header)
        os.ftruncate(self._journal, files.journal.valid_bytes)  # a torn tail
        fsync_dir(directory)
        self.segment = Segment(files, writable=True)

    def commit(self, start: int, end: int) -> None:
        """Makes [start, end), written through the arrays, durable and valid.

        Data reach the disk before the record that vouches for them.

        Raises:
            DiskFullError: the disk is full; the block is not committed.
            DamagedStoreError: somebody cut the file.
            StoreError: the disk failed.
        """
        segment = self.segment
        journal = segment.journal
        pages = journal.pages(start, end)
        try:
            segment.check_size()
            checksums = _hash_pages(segment, pages)
            record = journal_record(segment.info.segment_id, start, end, checksums)
            segment.flush()
            append(self._journal, journal.valid_bytes, record)
        except OSError as error:
            raise store_error(error, segment.directory, "saving KV pages") from error
        journal.valid_bytes += len(record)
        journal.record(start, end, checksums)
        segment.verified[:, pages] = True

    def close(self) -> None:
        """Gives the lock back; arrays that are still held stay valid, but must not be written."""
        fd, self._journal = self._journal, -1
        if fd >= 0:
            os.close(fd)
        self._lock.release()


def _hash_pages(segment: Segment, pages: slice) -> npt.NDArray[np.uint64]:
    """Checksums [num_layers, num_pages] of pages that were written."""

    def hash_layer(layer: int) -> list[int]:
        return [segment.checksum(layer, page) for page in range(pages.start, pages.stop)]

    # Reading and hashing release the GIL.
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="tsdoc-hash") as threads:
        layers = list(threads.map(hash_layer, range(segment.info.shape.num_layers)))
    return np.array(layers, dtype=np.uint64)


def append(fd: int, offset: int, data: bytes) -> None:
    """Writes to the end of a file, at `offset`, durably or not at all.

    Raises:
        OSError: for the caller to map.
    """
    rest = memoryview(data)
    try:
        while rest:
            written = os.pwrite(fd, rest, offset + len(data) - len(rest))
            rest = rest[written:]
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, offset)
        raise


def check_end(segment: Segment, end: int) -> None:
    """Raises ValueError unless a block of `segment` may end at `end`."""
    info = segment.info
    if end != info.end and (end % PAGE_SIZE or end % info.chunk_size):
        raise ValueError(
            f"a block must end at a multiple of {PAGE_SIZE} and {info.chunk_size}, not at {end}"
        )
