"""Computing single blocks of a damaged segment again, in place."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from tsdoc.errors import CorruptPageError, StoreError
from tsdoc.kernels.kv import KVPiece
from tsdoc.store.files import store_error
from tsdoc.store.key import Ids
from tsdoc.store.manifest import Part
from tsdoc.store.owned import OwnSegment, check_end
from tsdoc.store.pages import Segment
from tsdoc.store.piece import SegmentPiece
from tsdoc.store.tokens import read_header, read_ids


class Holder(Protocol):
    """An open entry or a writer: a chain of mapped segments."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Which segment holds which positions."""

    segments: list[Segment]
    owned: dict[str, OwnSegment]


class Repair:
    """Recomputes one damaged block in place; later blocks stay valid.

    Prefill `ids[num_committed:end]` into `pieces` and `commit`. The ids are the segment's, which
    may go on differently from the prompt at hand behind the part that both share.

    Attributes:
        ids: Token ids [0, end) of the segment's own prompt.
        pieces: Cover [0, end); the last one is writable.
        num_committed: Where the prefill goes on; equal to `end` when nothing is (any more) bad.
        end: One past the last position of the block.
    """

    def __init__(self, holder: Holder, start: int, end: int) -> None:
        at = next((i for i, p in enumerate(holder.parts) if p.start <= start < p.end), None)
        if at is None or end > holder.segments[at].info.end:
            raise ValueError(f"no block of this entry is [{start}, {end})")
        self._reader = holder.segments[at]
        if self._reader.info.parts != holder.parts[:at]:
            raise StoreError("is not the segment this entry was built on", where=str(self._path))
        # A repair may meet an earlier bad block of the segment that it (or the writer) holds.
        self._holder, self._name = holder, self._reader.info.segment_id
        self._closing = self._name not in holder.owned
        if self._closing:
            holder.owned[self._name] = OwnSegment(self._path)
        self._own = holder.owned[self._name]
        segment = self._own.segment
        self._writing = segment.writing
        self.num_committed, self.end = start, end
        try:
            self.ids = _segment_ids(segment)[:end]
            if self._is_good(start, end):
                self.num_committed = end
                self._reader.adopt(segment, start, end)
            else:
                _blank_unreadable(segment, start, end)
        except BaseException:
            self.close()
            raise
        segment.writing = (self.num_committed, end)
        before = zip(holder.segments[:at], holder.parts[:at], strict=True)
        self.pieces: list[KVPiece] = [
            *(SegmentPiece(part_segment, part.end) for part_segment, part in before),
            SegmentPiece(segment, segment.info.end),
        ]

    @property
    def _path(self) -> Path:
        return self._reader.directory

    def _is_good(self, start: int, end: int) -> bool:
        segment = self._own.segment
        segment.writing = (end, end)
        numbers = segment.journal.pages(start, end)
        pages = np.arange(numbers.start, numbers.stop)
        try:
            for layer in range(segment.info.shape.num_layers):
                segment.check(layer, pages)
        except CorruptPageError:
            return False
        return True

    def commit(self, end: int) -> None:
        """Commits [num_committed, end); see `Writer.commit`."""
        if not self.num_committed < end <= self.end:
            raise ValueError(f"no block of this repair ends at {end}")
        if end != self.end:
            check_end(self._own.segment, end)
        self._own.commit(self.num_committed, end)
        if self._reader is not self._own.segment:
            self._reader.adopt(self._own.segment, self.num_committed, end)
        self.num_committed = end
        self._own.segment.writing = (end, self.end)

    def close(self) -> None:
        """Gives the segment back."""
        self._own.segment.writing = self._writing
        if self._closing and self._holder.owned.pop(self._name, None) is not None:
            self._own.close()

    def __enter__(self) -> Repair:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _blank_unreadable(segment: Segment, start: int, end: int) -> None:
    try:
        segment.blank_unreadable(start, end)
    except OSError as error:
        raise store_error(error, segment.path, "replacing KV pages") from error


def _segment_ids(segment: Segment) -> Ids:
    info = segment.info
    header = read_header(
        segment.directory,
        entry_id=info.entry_id,
        num_tokens=info.end,
        chunk_size=info.chunk_size,
    )
    return read_ids(header)
