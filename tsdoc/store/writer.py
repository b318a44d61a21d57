"""Writing K and V: a new or resumed segment, and single blocks of a damaged one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tsdoc.engine.kv import KVPiece
from tsdoc.store.entry import Entry
from tsdoc.store.files import fsync_dir, open_file, reserve, store_error
from tsdoc.store.journal import journal_header, journal_record
from tsdoc.store.key import PAGE_SIZE, Ids
from tsdoc.store.locks import Lock, lock_exclusive
from tsdoc.store.manifest import Part
from tsdoc.store.pages import Segment, SegmentPiece
from tsdoc.store.segment import inspect_segment


class OwnSegment:
    """A segment that this process may write: locked, reserved, mapped, its journal open.

    Raises:
        ResourceError: the disk has no room.
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
                reserve(fd, info.kv_bytes, directory / "kv.bin")
            finally:
                os.close(fd)
            files = replace(files, reserved=True)
        self._journal = open_file(directory / "journal.bin", os.O_RDWR | os.O_CREAT)
        header = journal_header(info.segment_id)
        if os.fstat(self._journal).st_size < len(header):
            _append(self._journal, 0, header)
        os.ftruncate(self._journal, files.journal.valid_bytes)  # a torn tail
        fsync_dir(directory)
        self.segment = Segment(files, writable=True)

    def commit(self, start: int, end: int) -> None:
        """Makes [start, end), written through the arrays, durable and valid.

        Data reach the disk before the record that vouches for them.

        Raises:
            ResourceError: the disk is full; the block is not committed.
            StoreError: the disk failed.
        """
        segment = self.segment
        journal = segment.journal
        pages = journal.pages(start, end)
        num_layers = segment.info.shape.num_layers
        checksums = np.array(
            [
                [
                    [
                        segment.hash_page(layer, kind, page)
                        for page in range(pages.start, pages.stop)
                    ]
                    for kind in (0, 1)
                ]
                for layer in range(num_layers)
            ],
            dtype=np.uint64,
        )
        record = journal_record(segment.info.segment_id, start, end, checksums)
        try:
            segment.flush()
            _append(self._journal, journal.valid_bytes, record)
        except OSError as error:
            raise store_error(error, segment.directory, "saving KV pages") from error
        journal.valid_bytes += len(record)
        journal.record(start, end, checksums)
        segment.verified[:, :, pages] = True

    def close(self) -> None:
        """Gives the lock back; arrays that are still held stay valid, but must not be written."""
        fd, self._journal = self._journal, -1
        if fd >= 0:
            os.close(fd)
        self._lock.release()


def _append(fd: int, offset: int, data: bytes) -> None:
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


class Writer:
    """Prefill of one prompt: what is reused, and room for the rest.

    Leaving the `with` block without `finish` keeps what was committed for the next run.

    Attributes:
        entry_id: 32 hex digits.
        ids: The prompt's token ids.
        parts: Which segment holds which positions.
        segments: The mapped segments, one per part.
        num_committed: Positions [0, num_committed) are valid: the prefill goes on from here.
        reused_tokens: num_committed at the beginning.
        complete: The entry was finished before, perhaps by another process meanwhile.
    """

    def __init__(
        self,
        *,
        entry_id: str,
        ids: Ids,
        parts: tuple[Part, ...],
        segments: Sequence[Segment],
        own: OwnSegment | None,
        num_committed: int,
        complete: bool,
        locks: Sequence[Lock],
        publish: Callable[[Writer, Mapping[str, Any]], Entry],
    ) -> None:
        self.entry_id = entry_id
        self.ids = ids
        self.parts = parts
        self.segments = list(segments)
        self.num_committed = self.reused_tokens = num_committed
        self.complete = complete
        self._own = own
        self._locks = list(locks)
        self._publish = publish
        if own is not None:
            own.segment.writing = (num_committed, own.segment.info.end)

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.ids)

    @property
    def pieces(self) -> list[KVPiece]:
        """Covers [0, num_tokens): reused parts read-only, the entry's own writable."""
        return [
            SegmentPiece(segment, part.end)
            for segment, part in zip(self.segments, self.parts, strict=True)
        ]

    def commit(self, end: int) -> None:
        """Commits the block [num_committed, end), which the caller has written.

        Args:
            end: A multiple of page and chunk size, or the prompt's length.

        Raises:
            ValueError: `end` is no possible end of a block.
            ResourceError: the disk is full; the block is not committed.
            StoreError: the disk failed.
        """
        own = self._own
        if own is None or not self.num_committed < end <= self.num_tokens:
            raise ValueError(f"no block of this entry ends at {end}")
        check_end(own.segment, end)
        own.commit(self.num_committed, end)
        self.num_committed = end
        own.segment.writing = (end, own.segment.info.end)

    def finish(self, meta: Mapping[str, Any]) -> Entry:
        """Writes the manifest and opens the entry; the writer is closed.

        Args:
            meta: JSON values to keep with the entry, such as `sources`.

        Raises:
            ValueError: tokens are missing.
            StoreError: the manifest cannot be written.
        """
        if self.num_committed != self.num_tokens:
            raise ValueError(f"only {self.num_committed} of {self.num_tokens} tokens are committed")
        entry = self._publish(self, meta)
        self.close()
        return entry

    def own_segment(self, segment: Segment) -> OwnSegment | None:
        """Returns the writable segment if that is `segment`."""
        return self._own if self._own is not None and self._own.segment is segment else None

    def close(self) -> None:
        """Gives the locks back."""
        if self._own is not None:
            self._own.close()
        for lock in self._locks:
            lock.release()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def check_end(segment: Segment, end: int) -> None:
    """Raises ValueError unless a block of `segment` may end at `end`."""
    info = segment.info
    if end != info.end and (end % PAGE_SIZE or end % info.chunk_size):
        raise ValueError(
            f"a block must end at a multiple of {PAGE_SIZE} and {info.chunk_size}, not at {end}"
        )
