"""Cutting a segment back to the part of it that entries still use, in place.

Everything that is used stays where it is, and is valid at every moment. segment.json decides: what
comes before it only adds to the journal or can be made again, and what comes after it takes away
what nothing uses any more, tokens.bin last. A file of tokens that is longer than segment.json says
is a cut that was not finished.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash

from tsdoc.errors import CorruptPageError
from tsdoc.store.files import (
    fsync_dir,
    open_file,
    release,
    replace_file,
    temporary_name,
    write_json,
)
from tsdoc.store.journal import first_page, journal_record, without_invalid
from tsdoc.store.key import PAGE_SIZE, Ids, entry_id
from tsdoc.store.owned import append
from tsdoc.store.pages import Segment
from tsdoc.store.segment import (
    DERIVED_FILES,
    SegmentFiles,
    SegmentInfo,
    inspect_segment,
    read_journal_file,
)
from tsdoc.store.tokens import TokensHeader, read_header, read_ids, write_tokens


def cut_segment(directory: Path, end: int, *, name: str) -> None:
    """Takes everything behind position `end` out of a segment, or finishes doing so.

    Call it under `StoreRoot.changing`, while nobody has an entry open that names the segment.

    Args:
        directory: Of the segment.
        end: Where the last entry that uses it ends: a multiple of its chunk size, or its own end.
        name: Shown to the user from then on.

    Raises:
        DamagedStoreError: it is of no use to anybody.
        OSError: for the caller to map.
    """
    files = inspect_segment(directory)
    info = files.info
    header = read_header(
        directory, entry_id=info.entry_id, num_tokens=info.end, chunk_size=info.chunk_size
    )
    ids = read_ids(header)[:end]
    if end < info.end:
        _vouch(files, end)
        for derived in DERIVED_FILES:
            (directory / derived).unlink(missing_ok=True)
        info = replace(info, entry_id=entry_id(info.model_key, ids), name=name, end=end)
        write_json(directory / "segment.json", "segment", info.to_json())
    if files.reserved:
        _release_rows(directory / "kv.bin", info)
        _shorten_journal(directory, info)
    _replace_tokens(header, info, ids)


def _vouch(files: SegmentFiles, end: int) -> None:
    """Commits once more what blocks that go beyond `end` hold before it.

    Their records are not valid in a segment that ends there; those that end there are not before.
    """
    segment = Segment(files, writable=False)
    info, journal = segment.info, segment.journal
    pages = journal.pages(info.start, end)
    checksums = journal.checksums[:, pages].copy()
    is_beyond = journal.block_end[pages] > end
    last = pages.stop - 1
    first, stop = segment.bounds(last)
    if is_beyond[last] and stop > end:
        size = (end - first) * info.shape.row_bytes
        try:
            for layer in range(info.shape.num_layers):
                rows = memoryview(segment.checked_page(layer, last))[:size]
                checksums[layer, last] = xxhash.xxh3_64_intdigest(rows)
        except CorruptPageError:  # its block is computed again when it is needed
            unit = math.lcm(PAGE_SIZE, info.chunk_size)
            whole = first_page(end // unit * unit) - first_page(info.start)
            is_beyond[max(whole, 0) :] = False
    edges = np.flatnonzero(np.diff(is_beyond.astype(np.int8), prepend=0, append=0))
    records = b"".join(
        journal_record(
            info.segment_id,
            segment.bounds(begin)[0],
            min(segment.bounds(behind - 1)[1], end),
            checksums[:, begin:behind],
        )
        for begin, behind in edges.reshape(-1, 2).tolist()
    )
    fd = open_file(segment.directory / "journal.bin", os.O_RDWR)
    try:
        os.ftruncate(fd, journal.valid_bytes)
        append(fd, journal.valid_bytes, records)
    finally:
        os.close(fd)


def _release_rows(path: Path, info: SegmentInfo) -> None:
    """Gives back the places of the rows that a segment does not hold any more."""
    fd = open_file(path, os.O_RDWR)
    try:
        for layer in range(info.shape.num_layers):
            offset, _ = info.place(layer, info.end, info.end)
            release(fd, offset, (layer + 1) * info.region_bytes - offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def _shorten_journal(directory: Path, info: SegmentInfo) -> None:
    """Takes out the records that are not valid any more: many cuts would make it ever longer."""
    data = without_invalid(
        read_journal_file(directory, info),
        segment_id=info.segment_id,
        start=info.start,
        end=info.end,
        num_layers=info.shape.num_layers,
    )
    replace_file(directory / "journal.bin", data)


def _replace_tokens(header: TokensHeader, info: SegmentInfo, ids: Ids) -> None:
    path = header.peek.path
    temporary = temporary_name(path)
    write_tokens(
        temporary,
        segment_id=info.segment_id,
        entry_id=info.entry_id,
        ids=ids,
        hashes=header.hashes[: len(ids) // info.chunk_size],
        chunk_size=info.chunk_size,
    )
    temporary.replace(path)
    fsync_dir(path.parent)
