"""units.bin: checksums of parts of KV pages, so that a row can be used without reading its page.

A KV page is 256 tokens; a *unit* is as many of them as fit 4,096 bytes, a power of two. The file
only refines what the journal says: the digests of a page's units are sealed with that page's
checksum, so a unit is as good as the journal's word for its page. Whatever does not fit is checked
by whole pages instead. Layout: see FORMAT.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from tsdoc.errors import DamagedStoreError
from tsdoc.store.files import open_file
from tsdoc.store.key import PAGE_SIZE
from tsdoc.store.segment import SegmentInfo

UNITS_FILE = "units.bin"
UNIT_BYTES = 4096
VERSION = 2
_MAGIC = int.from_bytes(b"TSDOCUNT", "little")
_HEADER_WORDS = 6

Words = npt.NDArray[np.uint64]


def unit_tokens(row_bytes: int) -> int:
    """Tokens of a unit: the largest power of two whose rows fit 4,096 bytes, at least 1."""
    return min(PAGE_SIZE, 1 << max(0, (UNIT_BYTES // row_bytes).bit_length() - 1))


def units_header(info: SegmentInfo) -> bytes:
    """The first bytes of a segment's units.bin."""
    halves = [int(info.segment_id[:16], 16), int(info.segment_id[16:], 16)]
    words = [_MAGIC, VERSION, *halves, unit_tokens(info.shape.row_bytes)]
    data = np.array(words, dtype="<u8").tobytes()
    return data + int(xxhash.xxh3_64_intdigest(data)).to_bytes(8, "little")


def seal_page(digests: Words, page_checksum: int) -> int:
    """Ties the digests of a page's units to the page's checksum."""
    return int(xxhash.xxh3_64_intdigest(digests.tobytes(), seed=page_checksum))


def hash_units(rows: memoryview, first: int, info: SegmentInfo) -> Words:
    """Digests of a page's units, [units per page]; 0 for those that hold no row.

    Args:
        rows: The page's rows as bytes.
        first: Position of the first of them.
        info: Of the segment.
    """
    tokens, row_bytes = unit_tokens(info.shape.row_bytes), info.shape.row_bytes
    digests = np.zeros(PAGE_SIZE // tokens, dtype="<u8")
    at, skipped = 0, first % PAGE_SIZE
    while at < len(rows):
        unit, within = divmod(skipped + at // row_bytes, tokens)
        size = min((tokens - within) * row_bytes, len(rows) - at)
        digests[unit] = xxhash.xxh3_64_intdigest(rows[at : at + size])
        at += size
    return digests


class UnitTable:
    """An open units.bin, read a layer at a time.

    Args:
        directory: Of the segment.
        info: What segment.json says.
        num_pages: KV pages of the segment.

    Raises:
        DamagedStoreError: it is not this segment's, or not whole.
        OSError: there is none, or it cannot be read.
    """

    def __init__(self, directory: Path, info: SegmentInfo, num_pages: int) -> None:
        self.tokens = unit_tokens(info.shape.row_bytes)
        self._num_pages = num_pages
        self._words = PAGE_SIZE // self.tokens + 1
        self._fd = -1
        path = directory / UNITS_FILE
        header = units_header(info)
        size = len(header) + 8 * info.shape.num_layers * num_pages * self._words
        self._fd = open_file(path, os.O_RDONLY)
        if os.fstat(self._fd).st_size != size or os.pread(self._fd, len(header), 0) != header:
            raise DamagedStoreError("is not this segment's", where=str(path))
        self._header_bytes = len(header)
        self._tables: dict[int, Words] = {}

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def digests(self, layer: int, page: int, page_checksum: int) -> Words | None:
        """Digests of a page's units; None where they are not those of the page in the journal."""
        table = self._tables.get(layer)
        if table is None:
            table = self._tables[layer] = self._read(layer)
        row = table[page]
        if int(row[-1]) != seal_page(row[:-1], page_checksum):
            return None
        digests: Words = row[:-1]
        return digests

    def _read(self, layer: int) -> Words:
        size = 8 * self._num_pages * self._words
        try:
            data = os.pread(self._fd, size, self._header_bytes + layer * size)
        except OSError:
            data = b""
        data = data.ljust(size, b"\0")  # what is missing matches no seal
        return np.frombuffer(data, dtype="<u8").reshape(self._num_pages, self._words)
