"""A segment: the tokens that one run computed, with their K and V. Its small files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tsdoc.errors import DamagedStoreError
from tsdoc.store.files import read_file, read_json
from tsdoc.store.journal import (
    Journal,
    empty_journal,
    journal_header,
    page_count,
    read_journal,
)
from tsdoc.store.key import PAGE_SIZE, KVShape
from tsdoc.store.manifest import Part, read_parts, take_int, take_str

DERIVED_FILES = ("index.bin", "units.bin")
"""Those that are made from the others."""

SEGMENT_FILES = (
    "segment.json", "kv.bin", "journal.bin", "tokens.bin", *DERIVED_FILES, "write.lock",
)  # fmt: skip
"""Names in a segment's directory, in the order of deletion: without segment.json it is litter."""

ALIGNMENT = 4096
_MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """What segment.json says.

    Attributes:
        segment_id: 32 hex digits, the directory's name.
        entry_id: The entry whose prefill wrote it: its tokens are exactly that entry's.
        model_key: Digest of the model key.
        name: Shown to the user, for a segment whose manifest was lost.
        start: First position it holds.
        end: One past its last.
        capacity: Tokens that kv.bin has places for; more than `end - start` where it was cut.
        parts: The chain that covers [0, start).
        prefill_block: Block size of the run that began it (informative).
        created: Seconds since the epoch.
    """

    segment_id: str
    entry_id: str
    model_key: str
    name: str
    start: int
    end: int
    capacity: int
    shape: KVShape
    chunk_size: int
    prefill_block: int
    parts: tuple[Part, ...]
    created: float

    @property
    def region_bytes(self) -> int:
        """Bytes of one layer's rows, rounded up so that the next region is page-aligned."""
        data = self.capacity * self.shape.row_bytes
        return -(-data // ALIGNMENT) * ALIGNMENT

    @property
    def kv_bytes(self) -> int:
        """Exact size of kv.bin."""
        return self.shape.num_layers * self.region_bytes

    @property
    def is_cut(self) -> bool:
        """Whether it held more once; see `tsdoc.store.cutting`."""
        return self.end - self.start < self.capacity

    def place(self, layer: int, first: int, last: int) -> tuple[int, int]:
        """Offset and size, in bytes, of the rows of positions [first, last) in kv.bin."""
        row_bytes = self.shape.row_bytes
        offset = layer * self.region_bytes + (first - self.start) * row_bytes
        return offset, (last - first) * row_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns the payload of segment.json."""
        shape = self.shape
        cut = {"end": self.end} if self.is_cut else {}
        return {
            **cut,
            "segment_id": self.segment_id,
            "entry_id": self.entry_id,
            "model_key": self.model_key,
            "name": self.name,
            "start": self.start,
            "capacity": self.capacity,
            "num_layers": shape.num_layers,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "kv_dtype": shape.kv_dtype,
            "chunk_size": self.chunk_size,
            "page_size": PAGE_SIZE,
            "prefill_block": self.prefill_block,
            "parents": [part.to_json() for part in self.parts],
            "created": self.created,
        }


def read_info(directory: Path) -> SegmentInfo:
    """Reads segment.json and distrusts every value.

    Raises:
        StoreFormatError: another format version.
        DamagedStoreError: missing, damaged, or of another directory.
    """
    path = directory / "segment.json"
    payload = read_json(path, "segment")
    try:
        start = take_int(payload, "start", 0, _MAX_TOKENS)
        capacity = take_int(payload, "capacity", 1, _MAX_TOKENS - start)
        last = start + capacity
        shape = KVShape(
            num_layers=take_int(payload, "num_layers", 1, 4096),
            num_kv_heads=take_int(payload, "num_kv_heads", 1, 4096),
            head_dim=take_int(payload, "head_dim", 1, 16_384),
            kv_dtype=take_str(payload, "kv_dtype"),
        )
        info = SegmentInfo(
            segment_id=take_str(payload, "segment_id"),
            entry_id=take_str(payload, "entry_id"),
            model_key=take_str(payload, "model_key"),
            name=take_str(payload, "name"),
            start=start,
            end=take_int(payload, "end", start + 1, last) if "end" in payload else last,
            capacity=capacity,
            shape=shape,
            chunk_size=take_int(payload, "chunk_size", 1, _MAX_TOKENS),
            prefill_block=take_int(payload, "prefill_block", 1, _MAX_TOKENS),
            parts=read_parts(payload["parents"], start),
            created=float(payload["created"]),
        )
        take_int(payload, "page_size", PAGE_SIZE, PAGE_SIZE)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedStoreError(f"holds an impossible value ({error})", where=str(path)) from error
    if info.segment_id != directory.name or info.model_key != directory.parent.parent.name:
        raise DamagedStoreError("belongs to another directory", where=str(path))
    return info


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFiles:
    """A segment's small files, read and found consistent.

    Attributes:
        journal: Nothing committed where the run died before it wrote its journal.
        reserved: Whether kv.bin has its full size; if not, nothing is committed.
    """

    directory: Path
    info: SegmentInfo
    journal: Journal
    reserved: bool

    @property
    def committed(self) -> int:
        """Position up to which blocks are committed without a gap."""
        return self.journal.committed


def inspect_segment(directory: Path) -> SegmentFiles:
    """Reads segment.json and the journal, and checks the size of kv.bin.

    Raises:
        StoreFormatError: another format version.
        DamagedStoreError: what is there cannot be used at all.
    """
    info = read_info(directory)
    journal = load_journal(directory, info)
    path = directory / "kv.bin"
    try:
        size = path.lstat().st_size
    except OSError:
        size = 0
    if size == info.kv_bytes:
        return SegmentFiles(directory=directory, info=info, journal=journal, reserved=True)
    if journal.block_end.any():
        raise DamagedStoreError(
            f"has {size:,} bytes instead of {info.kv_bytes:,}" if size else "is missing or empty",
            where=str(path),
        )
    return SegmentFiles(directory=directory, info=info, journal=journal, reserved=False)


def read_journal_file(directory: Path, info: SegmentInfo) -> bytes:
    """Reads a segment's journal as it is on the disk.

    Raises:
        DamagedStoreError: it is no file of a journal's size.
    """
    num_pages = page_count(info.start, info.start + info.capacity)
    # Repairs and cuts append, so a journal may be longer than a record per page; not without end.
    limit = 4096 + 8 * (6 * num_pages + info.shape.num_layers * num_pages) * 16
    return read_file(directory / "journal.bin", limit)


def load_journal(directory: Path, info: SegmentInfo) -> Journal:
    """Reads a segment's journal; one that was never begun is an empty one.

    Raises:
        DamagedStoreError: its header is not this segment's.
    """
    path = directory / "journal.bin"
    num_layers = info.shape.num_layers
    if not path.exists():
        return empty_journal(info.start, info.end, num_layers)
    data = read_journal_file(directory, info)
    journal = read_journal(
        data, segment_id=info.segment_id, start=info.start, end=info.end, num_layers=num_layers
    )
    if journal is not None:
        return journal
    if len(data) < len(journal_header(info.segment_id)):  # the run died while it wrote it
        return empty_journal(info.start, info.end, num_layers)
    raise DamagedStoreError("is not this segment's journal", where=str(path))


def clip_parts(parts: tuple[Part, ...], end: int) -> tuple[Part, ...]:
    """Returns the part of a chain that covers [0, end)."""
    return tuple(replace(p, end=min(p.end, end)) for p in parts if p.start < end)
