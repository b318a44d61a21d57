"""Files that are made from a segment's K and V and could be made again: index.bin and units.bin.

They are written beside the others under a temporary name and renamed, so that a reader sees all of
one or nothing; whoever comes second replaces a file by an equal one. While they are written, they
are locked, so that nobody takes them for what a killed run has left.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tsdoc.errors import DamagedStoreError
from tsdoc.kernels.kv import KVArray, LayerIndex
from tsdoc.store.files import store_error
from tsdoc.store.index_file import INDEX_FILE, IndexLayout, write_index
from tsdoc.store.pages import Segment
from tsdoc.store.replacing import drop_temporary, replacing, write_all
from tsdoc.store.units import UNITS_FILE, hash_units, seal_page, units_header

MakeLayer = Callable[[int, KVArray], LayerIndex]
"""Makes one layer's index from its number and keys [num_tokens, num_kv_heads, head_dim]."""


def derived_bytes(segment: Segment) -> int:
    """Bytes that both files take."""
    info = segment.info
    num_pages = segment.num_pages
    units = 8 * info.shape.num_layers * num_pages * (segment.units_per_page + 1)
    return IndexLayout(info=info).num_bytes + units


def derive(segment: Segment, make_layer: MakeLayer) -> None:
    """Writes index.bin and units.bin of a segment whose tokens are all committed.

    Every page is read and checked on the way. The segment uses them from then on.

    Raises:
        CorruptPageError: a page does not match its checksum.
        DiskFullError: the disk is full.
        StoreError: the store cannot be written.
    """
    info = segment.info
    tables = bytearray(units_header(info))

    def make(layer: int) -> LayerIndex:
        tables.extend(_unit_table(segment, layer))
        return make_layer(layer, segment.rows(layer)[:, 0])

    _replace(segment.directory / INDEX_FILE, lambda fd: write_index(fd, info, make))
    _replace(segment.directory / UNITS_FILE, lambda fd: write_all(fd, memoryview(tables)))
    segment.use_derived()


def _unit_table(segment: Segment, layer: int) -> bytes:
    parts = []
    for page in range(segment.num_pages):
        data, (first, _) = segment.checked_page(layer, page), segment.bounds(page)
        digests = hash_units(memoryview(data), first, segment.info)
        seal = seal_page(digests, int(segment.journal.checksums[layer, page]))
        parts.append(digests.tobytes() + seal.to_bytes(8, "little"))
    return b"".join(parts)


def _replace(path: Path, write: Callable[[int], None]) -> None:
    try:
        drop_temporary(path.parent)  # those of runs that were killed
        with replacing(path) as fd:
            write(fd)
    except OSError as error:
        raise store_error(error, path, "writing it") from error


def is_derivable(segment: Segment) -> bool:
    """Whether all of a segment's tokens are committed, and nobody here is writing them."""
    first, last = segment.writing
    return segment.journal.committed == segment.info.end and first >= last


def has_index(segment: Segment) -> bool:
    """Whether both files are there and good.

    Raises:
        DamagedStoreError: one is there and is not good.
    """
    if segment.index() is None:
        return False
    if segment.units() is None:
        raise DamagedStoreError("is missing or damaged", where=str(segment.directory / UNITS_FILE))
    return True
