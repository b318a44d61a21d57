"""The journal of a segment: one checksummed record per committed prefill block.

Everything is little-endian uint64 words, so that a reader can find the next whole record after a
damaged one. Layout: see FORMAT.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from tsdoc.store.key import FORMAT, PAGE_SIZE

_FILE_MAGIC = int.from_bytes(b"TSDOCJNL", "little")
_RECORD_MAGIC = int.from_bytes(b"TSDOCBLK", "little")
_HEADER_WORDS = 6
_FIXED_WORDS = 6

HEADER_BYTES = 8 * _HEADER_WORDS
"""Size of a journal in which nothing is committed."""

Words = npt.NDArray[np.uint64]


def first_page(start: int) -> int:
    """Number of the page that holds position `start`."""
    return start // PAGE_SIZE


def page_count(start: int, end: int) -> int:
    """Number of pages that [start, end) touches."""
    return -(-end // PAGE_SIZE) - start // PAGE_SIZE


def _sealed(words: list[int], body: Words | None, segment_id: str) -> bytes:
    seed = int(segment_id[:16], 16)
    data = np.array(words, dtype="<u8").tobytes() + (b"" if body is None else body.tobytes())
    return data + int(xxhash.xxh3_64_intdigest(data, seed=seed)).to_bytes(8, "little")


def journal_header(segment_id: str) -> bytes:
    """Returns the first bytes of a journal."""
    halves = [int(segment_id[:16], 16), int(segment_id[16:], 16)]
    return _sealed([_FILE_MAGIC, FORMAT, PAGE_SIZE, *halves], None, segment_id)


def journal_record(segment_id: str, start: int, end: int, checksums: Words) -> bytes:
    """Returns the record that commits [start, end).

    `checksums` are the XXH3-64 of every page, [num_layers, pages of the block].
    """
    num_layers, num_pages = checksums.shape
    words = [_RECORD_MAGIC, start, end, num_layers, num_pages]
    return _sealed(words, np.ascontiguousarray(checksums, dtype="<u8"), segment_id)


def least_bytes(start: int, end: int, num_layers: int) -> int:
    """Size of the shortest journal in which [start, end) is committed: as one block."""
    return HEADER_BYTES + 8 * (_FIXED_WORDS + num_layers * page_count(start, end))


@dataclass(slots=True, kw_only=True)
class Journal:
    """What a segment's journal says, per page of the segment [start, end).

    Attributes:
        checksums: [num_layers, num_pages].
        block_start: First position of the block that committed a page, [num_pages].
        block_end: One past its last; 0 where no valid record covers the page.
        valid_bytes: Where the last whole record ends; what follows is torn.
    """

    start: int
    end: int
    checksums: Words
    block_start: npt.NDArray[np.int64]
    block_end: npt.NDArray[np.int64]
    valid_bytes: int

    @property
    def committed(self) -> int:
        """Position up to which, from the segment's start, every page is covered."""
        missing = np.flatnonzero(self.block_end == 0)
        if not len(missing):
            return self.end
        return max(self.start, (first_page(self.start) + int(missing[0])) * PAGE_SIZE)

    def pages(self, start: int, end: int) -> slice:
        """Indices, within this segment, of the pages that [start, end) touches."""
        first = first_page(start) - first_page(self.start)
        return slice(first, first + page_count(start, end))

    def record(self, start: int, end: int, checksums: Words) -> None:
        """Notes a committed block; it replaces what was known of its pages."""
        pages = self.pages(start, end)
        self.checksums[:, pages] = checksums
        self.block_start[pages] = start
        self.block_end[pages] = end

    def block_of(self, page: int) -> tuple[int, int]:
        """Range to recompute when page number `page` (of the segment) is bad."""
        if self.block_end[page]:
            return int(self.block_start[page]), int(self.block_end[page])
        before = np.flatnonzero(self.block_end[:page])
        after = np.flatnonzero(self.block_end[page:])
        base = first_page(self.start)
        first = base + (int(before[-1]) + 1 if len(before) else 0)
        last = base + (page + int(after[0]) if len(after) else len(self.block_end))
        return max(self.start, first * PAGE_SIZE), min(self.end, last * PAGE_SIZE)


def empty_journal(start: int, end: int, num_layers: int) -> Journal:
    """Returns the journal of a segment in which nothing is committed."""
    num_pages = page_count(start, end)
    return Journal(
        start=start,
        end=end,
        checksums=np.zeros((num_layers, num_pages), dtype=np.uint64),
        block_start=np.zeros(num_pages, dtype=np.int64),
        block_end=np.zeros(num_pages, dtype=np.int64),
        valid_bytes=HEADER_BYTES,
    )


def read_journal(
    data: bytes, *, segment_id: str, start: int, end: int, num_layers: int
) -> Journal | None:
    """Reads a journal, passing over damaged records; None when not even the header is right."""
    header = journal_header(segment_id)
    if data[: len(header)] != header:
        return None
    journal = empty_journal(start, end, num_layers)
    for record in _take_records(journal, data, segment_id):
        journal.valid_bytes = record.stop
    return journal


def without_invalid(
    data: bytes, *, segment_id: str, start: int, end: int, num_layers: int
) -> bytes:
    """Returns a journal, whose header is right, without what `read_journal` passes over."""
    journal = empty_journal(start, end, num_layers)
    records = (data[record] for record in _take_records(journal, data, segment_id))
    return b"".join([data[:HEADER_BYTES], *records])


def _take_records(journal: Journal, data: bytes, segment_id: str) -> Iterator[slice]:
    """Notes every record that is good, and tells where it is in `data`."""
    words = np.frombuffer(data, dtype="<u8", count=len(data) // 8)
    num_layers = len(journal.checksums)
    starts = np.flatnonzero(words == _RECORD_MAGIC)
    at, index = _HEADER_WORDS, 0
    while index < len(starts):
        if starts[index] < at:  # a checksum that happens to look like a record's beginning
            index += 1
            continue
        length = _take_record(journal, words[starts[index] :], segment_id, num_layers)
        if length:
            at = int(starts[index]) + length
            yield slice(8 * (at - length), 8 * at)
        index += 1


def _take_record(journal: Journal, words: Words, segment_id: str, num_layers: int) -> int:
    """Notes the record at the beginning of `words`; returns its length, 0 if it is no good."""
    if len(words) < _FIXED_WORDS:
        return 0
    start, end, layers, num_pages = (int(word) for word in words[1:5])
    if not journal.start <= start < end <= journal.end or layers != num_layers:
        return 0
    if (start != journal.start and start % PAGE_SIZE) or (end != journal.end and end % PAGE_SIZE):
        return 0
    length = _FIXED_WORDS + layers * num_pages
    if num_pages != page_count(start, end) or length > len(words):
        return 0
    body = words[: length - 1]
    if xxhash.xxh3_64_intdigest(body.data, seed=int(segment_id[:16], 16)) != int(words[length - 1]):
        return 0
    journal.record(start, end, body[5:].reshape(layers, num_pages))
    return length
