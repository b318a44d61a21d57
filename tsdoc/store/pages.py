"""Mapped segments: arrays of K and V, and checks of their pages before use.

Reading a mapping whose file was cut, or whose disk fails, ends the process (SIGBUS). So a page is
first read with `pread`, which can fail in good order, and before every use the size of the file is
looked at. What remains is a file that somebody cuts in the milliseconds between that look and the
use, and a disk that fails on a page which was checked and then dropped from the page cache.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from tsdoc.errors import CorruptPageError, DamagedStoreError
from tsdoc.kernels.kv import KEYS, VALUES, KVArray, LayerIndex
from tsdoc.store.files import open_file, store_error
from tsdoc.store.index_file import read_index
from tsdoc.store.journal import first_page
from tsdoc.store.key import PAGE_SIZE
from tsdoc.store.segment import SegmentFiles
from tsdoc.store.units import UnitTable, unit_tokens

NO_CHECKSUM = "has no valid checksum"
MISMATCH = "does not match its checksum"


class Segment:
    """A mapped segment: arrays of K and V, and checks of their pages.

    Args:
        files: What `inspect_segment` found; `reserved` must be true.
        writable: Map for writing; otherwise arrays are read-only.

    Attributes:
        writing: Positions [first, last) that this process is writing and that are not checked.

    Raises:
        DamagedStoreError: kv.bin cannot be mapped.
    """

    def __init__(self, files: SegmentFiles, *, writable: bool) -> None:
        self.directory = files.directory
        self.info = files.info
        self.journal = files.journal
        self.writing = (files.info.end, files.info.end)
        shape = files.info.shape
        num_pages = len(files.journal.block_end)
        self.verified = np.zeros((shape.num_layers, 2, num_pages), dtype=np.bool_)
        self._sparse = -1
        self._lock = threading.RLock()
        self._fd, self._map = _map_file(self.path, files.info.kv_bytes, writable=writable)
        self._regions = self._cut()
        self._index: list[tuple[LayerIndex, ...] | None] = []  # one, once it was looked for
        self._units: list[UnitTable | None] = []
        self._units_verified: dict[tuple[int, int], npt.NDArray[np.bool_]] = {}
        self._fresh: dict[tuple[int, int, int], int] = {}  # checksums of what `write` wrote

    def __del__(self) -> None:
        for name in ("_fd", "_sparse"):
            fd = getattr(self, name, -1)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)

    @property
    def path(self) -> Path:
        """The file that is mapped."""
        return self.directory / "kv.bin"

    def _cut(self) -> list[KVArray]:
        info, shape = self.info, self.info.shape
        count = (info.end - info.start) * shape.num_kv_heads * shape.head_dim
        rows = (-1, shape.num_kv_heads, shape.head_dim)
        size = info.region_bytes
        regions: list[KVArray] = []
        for at in range(2 * shape.num_layers):
            flat: KVArray = np.frombuffer(self._map, shape.dtype, count, at * size)
            regions.append(flat.reshape(rows))
        return regions

    def rows(self, layer: int, kind: int) -> KVArray:
        """K (`KEYS`) or V (`VALUES`) of a layer, [capacity, num_kv_heads, head_dim]."""
        return self._regions[2 * layer + kind]

    @property
    def inode(self) -> int:
        """Of the file that is mapped."""
        return os.fstat(self._fd).st_ino

    def flush(self) -> None:
        """Writes what was changed through the mapping to disk.

        Not by msync: Python's keeps the interpreter's lock meanwhile, and the threads that compute
        and fill the next block would stand still.
        """
        os.fdatasync(self._fd)

    def check_size(self) -> None:
        """Raises DamagedStoreError when the file was cut since it was mapped."""
        size = self._map.size()
        if size < self.info.kv_bytes:
            raise DamagedStoreError(
                f"was cut to {size:,} of {self.info.kv_bytes:,} bytes while in use",
                where=str(self.path),
            )

    @property
    def units_per_page(self) -> int:
        """See `tsdoc.store.units`."""
        return PAGE_SIZE // unit_tokens(self.info.shape.row_bytes)

    def use_derived(self) -> None:
        """Looks for index.bin and units.bin anew."""
        self._index, self._units = [], []

    def index(self) -> tuple[LayerIndex, ...] | None:
        """The key index, one per layer; None where there is none.

        Raises:
            DamagedStoreError: it is damaged.
        """
        if not self._index:
            self._index = [None]  # what a damaged one is as good as
            self._index = [read_index(self.directory, self.info)]
        return self._index[0]

    def units(self) -> UnitTable | None:
        """Checksums finer than pages; None where there are none."""
        if not self._units:
            units: UnitTable | None = None
            with contextlib.suppress(OSError, DamagedStoreError):
                units = UnitTable(self.directory, self.info, self.verified.shape[2])
            self._units = [units]
        return self._units[0]

    def check_rows(self, layer: int, kind: int, positions: npt.NDArray[np.int64]) -> None:
        """Checks what holds `positions` (sorted, of this segment): units, else whole pages.

        Raises:
            CorruptPageError: a page is not what was committed, or was never committed.
        """
        pages = positions // PAGE_SIZE - first_page(self.info.start)
        rest = positions[~self.verified[layer, kind, pages]]
        if len(rest):
            with self._lock:
                self._check_rows(layer, kind, rest)

    def _check_rows(self, layer: int, kind: int, rest: npt.NDArray[np.int64]) -> None:
        units = self.units()
        if units is not None:
            numbers = np.unique(rest // units.tokens) - self._first_unit(units)
            wanted = self._check_units(layer, kind, units, numbers)
            pages = np.unique(wanted // self.units_per_page)
        else:
            pages = np.unique(rest // PAGE_SIZE) - first_page(self.info.start)
        if len(pages):
            self.check(layer, kind, self.without_written(pages))

    def _first_unit(self, units: UnitTable) -> int:
        """Number, counted from position 0, of the first unit of this segment's first page."""
        return first_page(self.info.start) * (PAGE_SIZE // units.tokens)

    def _check_units(
        self, layer: int, kind: int, units: UnitTable, numbers: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Checks units (numbers within the segment); returns those that pages have to vouch for."""
        per_page = self.units_per_page
        verified = self._units_verified.setdefault(
            (layer, kind), np.zeros(self.verified.shape[2] * per_page, dtype=np.bool_)
        )
        doubtful = []
        page, digests = -1, None
        numbers = numbers[~verified[numbers]]
        self._read_ahead(layer, kind, units, numbers)
        for number in numbers.tolist():
            if number // per_page != page:
                page = number // per_page
                checksum = int(self.journal.checksums[layer, kind, page])
                digests = units.digests(layer, kind, page, checksum)
                if not self.journal.block_end[page]:
                    digests = None
            offset, size = self._units_place(layer, kind, units, number, number + 1)
            data = b""
            with contextlib.suppress(OSError):  # the page's own check says what is wrong
                data = os.pread(self._sparse_fd(), size, offset)
            wanted = None if digests is None else int(digests[number % per_page])
            if len(data) == size and xxhash.xxh3_64_intdigest(data) == wanted:
                verified[number] = True
            else:
                doubtful.append(number)
        return np.array(doubtful, dtype=np.int64)

    def _units_place(
        self, layer: int, kind: int, units: UnitTable, first: int, last: int
    ) -> tuple[int, int]:
        """Offset and size, in bytes, of units [first, last)."""
        base = self._first_unit(units)
        start = max((base + first) * units.tokens, self.info.start)
        end = min((base + last) * units.tokens, self.info.end)
        return self._offset(layer, kind, start), (end - start) * self.info.shape.row_bytes

    def _read_ahead(
        self, layer: int, kind: int, units: UnitTable, numbers: npt.NDArray[np.int64]
    ) -> None:
        """Lets the disk fetch all these units at once, rather than one after the other."""
        if not len(numbers) or not hasattr(os, "posix_fadvise"):
            return
        cuts = np.flatnonzero(np.diff(numbers) > 1)
        firsts = numbers[np.concatenate(([0], cuts + 1))]
        lasts = numbers[np.concatenate((cuts, [len(numbers) - 1]))] + 1
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            offset, size = self._units_place(layer, kind, units, first, last)
            os.posix_fadvise(self._sparse_fd(), offset, size, os.POSIX_FADV_WILLNEED)

    def _sparse_fd(self) -> int:
        """A descriptor by which the kernel reads no more than it is asked for."""
        if self._sparse < 0:
            try:
                found = open_file(self.path, os.O_RDONLY)
            except (OSError, DamagedStoreError):  # it was moved: what is mapped is still there
                return self._fd
            if os.fstat(found).st_ino != os.fstat(self._fd).st_ino:
                os.close(found)
                return self._fd
            self._sparse = found
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._sparse, 0, 0, os.POSIX_FADV_RANDOM)
        return self._sparse

    def read_page(self, layer: int, kind: int, page: int) -> tuple[bytes, int]:
        """The bytes of a page, and the position of its first row.

        Raises:
            OSError: it cannot be read.
        """
        offset, size = self._place(layer, kind, page)
        return os.pread(self._fd, size, offset), self._bounds(page)[0]

    def hash_page(self, layer: int, kind: int, page: int) -> int:
        """Returns the checksum of page number `page` of this segment as it is now.

        Raises:
            OSError: it cannot be read.
        """
        offset, size = self._place(layer, kind, page)
        data = os.pread(self._fd, size, offset)
        if len(data) < size:
            self.check_size()
        return int(xxhash.xxh3_64_intdigest(data))

    def _bounds(self, page: int) -> tuple[int, int]:
        """Positions [first, last) that page number `page` of this segment holds."""
        first = (first_page(self.info.start) + page) * PAGE_SIZE
        return max(first, self.info.start), min(first + PAGE_SIZE, self.info.end)

    def _offset(self, layer: int, kind: int, position: int) -> int:
        """Where a row begins in the file."""
        info = self.info
        region = (2 * layer + kind) * info.region_bytes
        return region + (position - info.start) * info.shape.row_bytes

    def _place(self, layer: int, kind: int, page: int) -> tuple[int, int]:
        """Offset and size, in bytes, of a page in the file."""
        first, last = self._bounds(page)
        return self._offset(layer, kind, first), (last - first) * self.info.shape.row_bytes

    def read(self, layer: int, kind: int, start: int, out: KVArray) -> None:
        """Copies rows from position `start` on into `out`; see `KVPiece.read`.

        Checksums are taken of the copy, so what is used is what was checked.
        """
        end = start + len(out)
        pages = self.is_checkable(start, end)
        view = out.data.cast("B")
        offset = self._offset(layer, kind, start)
        try:
            while view:
                count = os.preadv(self._fd, [view], offset)
                if count == 0:
                    self.check_size()
                    raise DamagedStoreError("ends too early", where=str(self.path))
                view, offset = view[count:], offset + count
        except OSError as error:
            self.check(layer, kind, pages)  # names the page
            raise store_error(error, self.path, "reading KV pages") from error
        self._check_copy(layer, kind, pages, start, out)

    def _check_copy(
        self, layer: int, kind: int, pages: npt.NDArray[np.int64], start: int, rows: KVArray
    ) -> None:
        """Checks pages against a copy of the rows from `start` on; the file where they are cut."""
        verified, journal = self.verified[layer, kind], self.journal
        pages = pages[~verified[pages]]
        whole, digests = self._digests(pages, start, rows)
        good = digests == journal.checksums[layer, kind, whole]
        good &= journal.block_end[whole] != 0
        verified[whole[good]] = True
        self.check(layer, kind, pages)  # those at the ends, and to name one that is not good

    def _digests(
        self, pages: npt.NDArray[np.int64], start: int, rows: KVArray
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Those of `pages` that lie whole in the rows from `start` on, and their checksums."""
        view, row_bytes = rows.data.cast("B"), self.info.shape.row_bytes
        whole, digests = [], []
        for page in pages.tolist():
            first, last = self._bounds(page)
            if start <= first and last <= start + len(rows):
                part = view[(first - start) * row_bytes : (last - start) * row_bytes]
                digests.append(xxhash.xxh3_64_intdigest(part))
                whole.append(page)
        return np.array(whole, dtype=np.int64), np.array(digests, dtype=np.uint64)

    def write(self, layer: int, kind: int, start: int, rows: KVArray) -> None:
        """Writes rows from position `start` on; see `KVPiece.write`.

        Checksums are taken on the way, so that a commit has little left to do but to wait.
        """
        pages = self.journal.pages(start, start + len(rows))
        whole, digests = self._digests(np.arange(pages.start, pages.stop), start, rows)
        view = rows.data.cast("B")
        offset = self._offset(layer, kind, start)
        try:
            while view:
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise store_error(error, self.path, "writing KV pages") from error
        for page, digest in zip(whole.tolist(), digests.tolist(), strict=True):
            self._fresh[layer, kind, page] = digest

    def checksum(self, layer: int, kind: int, page: int) -> int:
        """Returns the checksum of a page that is about to be committed.

        Raises:
            OSError: it cannot be read.
        """
        digest = self._fresh.pop((layer, kind, page), None)
        return self.hash_page(layer, kind, page) if digest is None else digest

    def blank_unreadable(self, start: int, end: int) -> None:
        """Puts zeros where the disk cannot read [start, end), so that it can be written mapped.

        Raises:
            OSError: nor can it be written.
        """
        pages = self.journal.pages(start, end)
        for layer, kind, page in itertools.product(
            range(self.info.shape.num_layers), (KEYS, VALUES), range(pages.start, pages.stop)
        ):
            offset, size = self._place(layer, kind, page)
            try:
                os.pread(self._fd, size, offset)
            except OSError:
                os.pwrite(self._fd, bytes(size), offset)

    def check(self, layer: int, kind: int, pages: npt.NDArray[np.int64]) -> None:
        """Checks pages (numbers within the segment) that were not checked before.

        Raises:
            CorruptPageError: a page is not what was committed, or was never committed.
        """
        verified = self.verified[layer, kind]
        for page in pages[~verified[pages]].tolist():
            fault = self._fault(layer, kind, page)
            if fault:
                self._fail(layer, kind, page, fault)
            verified[page] = True

    def _fault(self, layer: int, kind: int, page: int) -> str:
        """Says what is wrong with a page; empty when nothing is."""
        if not self.journal.block_end[page]:
            return NO_CHECKSUM
        try:
            found = self.hash_page(layer, kind, page)
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        same = found == int(self.journal.checksums[layer, kind, page])
        return "" if same else MISMATCH

    def _fail(self, layer: int, kind: int, page: int, what: str) -> None:
        start, end = self.journal.block_of(page)
        name = "V" if kind == VALUES else "K"
        number = first_page(self.info.start) + page
        raise CorruptPageError(
            f"KV page {number} of layer {layer} ({name}) {what}",
            where=str(self.path),
            start=start,
            end=end,
        )

    def verify(self) -> Iterator[CorruptPageError | None]:
        """Checks every page again; yields every error, and None after each layer's K and V."""
        for layer in range(self.info.shape.num_layers):
            for kind in (KEYS, VALUES):
                self.verified[layer, kind] = False
                yield from self._verify_region(layer, kind)

    def _verify_region(self, layer: int, kind: int) -> Iterator[CorruptPageError | None]:
        for page in range(self.verified.shape[2]):
            try:
                self.check(layer, kind, np.array([page]))
            except CorruptPageError as error:
                yield error
        yield None

    def is_checkable(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Numbers of the pages that hold [first, last), without those being written now."""
        pages = self.journal.pages(first, last)
        numbers = np.arange(pages.start, pages.stop)
        return self.without_written(numbers)

    def without_written(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Leaves out pages that this process is writing."""
        first, last = self.writing
        if first >= last:
            return pages
        skip = self.journal.pages(first, last)
        return np.asarray(pages[(pages < skip.start) | (pages >= skip.stop)], dtype=np.int64)

    def adopt(self, other: Segment, start: int, end: int) -> None:
        """Takes over what `other`, the same segment, knows of the pages of [start, end)."""
        pages = self.journal.pages(start, end)
        for name in ("block_start", "block_end"):
            getattr(self.journal, name)[pages] = getattr(other.journal, name)[pages]
        self.journal.checksums[:, :, pages] = other.journal.checksums[:, :, pages]
        self.verified[:, :, pages] = other.verified[:, :, pages]


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
