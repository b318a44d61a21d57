"""Segments whose pages are checked before use, each once: whole, or by the units of single rows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from tsdoc.errors import CorruptPageError, DamagedStoreError
from tsdoc.kernels.kv import KVArray, LayerIndex
from tsdoc.store.files import store_error
from tsdoc.store.index_file import read_index
from tsdoc.store.journal import first_page
from tsdoc.store.key import PAGE_SIZE
from tsdoc.store.mapped import MappedSegment
from tsdoc.store.segment import SegmentFiles
from tsdoc.store.unit_checks import UnitChecks
from tsdoc.store.units import UnitTable, unit_tokens

NO_CHECKSUM = "has no valid checksum"
MISMATCH = "does not match its checksum"


class Segment(MappedSegment):
    """A mapped segment: arrays of K and V, and checks of their pages.

    Attributes:
        writing: Positions [first, last) that this process is writing and that are not checked.
        verified: Whether a page was checked, [num_layers, num_pages].

    Raises:
        DamagedStoreError: kv.bin cannot be mapped.
    """

    def __init__(self, files: SegmentFiles, *, writable: bool) -> None:
        super().__init__(files, writable=writable)
        self.writing = (files.info.end, files.info.end)
        self.verified = np.zeros((files.info.shape.num_layers, self.num_pages), dtype=np.bool_)
        self._lock = threading.RLock()
        self._index: list[tuple[LayerIndex, ...] | None] = []  # one, once it was looked for
        self._units: list[UnitChecks | None] = []
        self._fresh: dict[tuple[int, int], int] = {}  # checksums of what `write` wrote

    @property
    def units_per_page(self) -> int:
        """See `tsdoc.store.units`."""
        return PAGE_SIZE // unit_tokens(self.info.shape.row_bytes)

    def use_derived(self) -> None:
        """Looks for index.bin and units.bin anew."""
        with self._lock:
            self._index, self._units = [], []

    def index(self) -> tuple[LayerIndex, ...] | None:
        """The key index, one per layer; None where there is none.

        Raises:
            DamagedStoreError: it is damaged; from then on it is as good as none.
        """
        with self._lock:
            if not self._index:
                self._index = [None]
                self._index = [read_index(self.directory, self.info)]
            return self._index[0]

    def units(self) -> UnitChecks | None:
        """Checks finer than pages; None where units.bin is missing or damaged."""
        with self._lock:
            if not self._units:
                units: UnitChecks | None = None
                with contextlib.suppress(OSError, DamagedStoreError):
                    table = UnitTable(self.directory, self.info, self.num_pages)
                    units = UnitChecks(self.info, self.journal, table, self.open_again())
                self._units = [units]
            return self._units[0]

    def check_rows(self, layer: int, positions: npt.NDArray[np.int64]) -> None:
        """Checks what holds `positions` (sorted, of this segment): units, else whole pages.

        Raises:
            CorruptPageError: a page is not what was committed, or was never committed.
        """
        first = first_page(self.info.start)
        rest = positions[~self.verified[layer, positions // PAGE_SIZE - first]]
        if not len(rest):
            return
        with self._lock:
            units = self.units()
            if units is not None:
                pages = units.doubtful_pages(layer, rest)
            else:
                pages = np.unique(rest // PAGE_SIZE) - first
            self.check(layer, self.without_written(pages))

    def read(self, layer: int, start: int, out: KVArray) -> None:
        """Copies rows from position `start` on into `out`; see `KVPiece.read`.

        Checksums are taken of the copy, so what is used is what was checked.
        """
        positions = self.copy(layer, start, out)
        self._check_copy(layer, self._number(positions), start, out)

    def copy(self, layer: int, start: int, out: KVArray) -> npt.NDArray[np.int64]:
        """See `UncheckedRows.copy`."""
        pages = self.is_checkable(start, start + len(out))
        try:
            self.fill(layer, start, out)
        except OSError as error:
            for page in pages.tolist():
                self.checked_page(layer, page)  # names the one that cannot be read
            raise store_error(error, self.path, "reading KV pages") from error
        pages = pages[~self.verified[layer, pages]]
        positions = self._positions(pages)
        whole = (positions >= start) & (positions + PAGE_SIZE <= start + len(out))
        self._check_copy(layer, pages[~whole], start, out)
        return self._positions(pages[whole])

    def confirm(
        self, layer: int, positions: npt.NDArray[np.int64], digests: npt.NDArray[np.uint64]
    ) -> None:
        """See `UncheckedRows.confirm`."""
        pages = self._number(positions)
        good = digests == self.journal.checksums[layer, pages]
        good &= self.journal.block_end[pages] != 0
        self.verified[layer, pages[good]] = True
        for page in pages[~good].tolist():
            self.checked_page(layer, page)  # says more, where the file is at fault
            self._fail(layer, page, MISMATCH)

    def _number(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Numbers, within the segment, of the pages that hold `positions`."""
        return positions // PAGE_SIZE - first_page(self.info.start)

    def _positions(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where pages begin in the prompt; the first one may begin before the segment."""
        positions: npt.NDArray[np.int64] = (first_page(self.info.start) + pages) * PAGE_SIZE
        return positions

    def _check_copy(
        self, layer: int, pages: npt.NDArray[np.int64], start: int, rows: KVArray
    ) -> None:
        """Checks pages against a copy of the rows from `start` on; the file where they are cut."""
        whole, digests = self._digests(pages, start, rows)
        self.confirm(layer, self._positions(whole), digests)
        self.check(layer, pages)

    def _digests(
        self, pages: npt.NDArray[np.int64], start: int, rows: KVArray
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Those of `pages` that lie whole in the rows from `start` on, and their checksums."""
        view, row_bytes = rows.data.cast("B"), self.info.shape.row_bytes
        whole, digests = [], []
        for page in pages.tolist():
            first, last = self.bounds(page)
            if start <= first and last <= start + len(rows):
                part = view[(first - start) * row_bytes : (last - start) * row_bytes]
                digests.append(xxhash.xxh3_64_intdigest(part))
                whole.append(page)
        return np.array(whole, dtype=np.int64), np.array(digests, dtype=np.uint64)

    def write(self, layer: int, start: int, rows: KVArray) -> None:
        """Writes rows from position `start` on; see `KVPiece.write`.

        Checksums are taken on the way, so that a commit has little left to do but to wait.
        """
        pages = self.journal.pages(start, start + len(rows))
        whole, digests = self._digests(np.arange(pages.start, pages.stop), start, rows)
        for page in range(pages.start, pages.stop):
            self._fresh.pop((layer, page), None)
        self.put(layer, start, rows)
        for page, digest in zip(whole.tolist(), digests.tolist(), strict=True):
            self._fresh[layer, page] = digest

    def checksum(self, layer: int, page: int) -> int:
        """Returns the checksum of a page that is about to be committed.

        Raises:
            OSError: it cannot be read.
        """
        digest = self._fresh.pop((layer, page), None)
        if digest is None:
            digest = int(xxhash.xxh3_64_intdigest(self.read_page(layer, page)))
        return digest

    def check(self, layer: int, pages: npt.NDArray[np.int64]) -> None:
        """Checks pages (numbers within the segment) that were not checked before.

        Raises:
            CorruptPageError: a page is not what was committed, or was never committed.
        """
        for page in pages[~self.verified[layer, pages]].tolist():
            self.checked_page(layer, page)

    def checked_page(self, layer: int, page: int) -> bytes:
        """The bytes of a page, read and checked now.

        Raises:
            CorruptPageError: it is not what was committed, or was never committed.
        """
        if not self.journal.block_end[page]:
            self._fail(layer, page, NO_CHECKSUM)
        try:
            data = self.read_page(layer, page)
        except OSError as error:
            self._fail(layer, page, f"cannot be read ({error.strerror})")
        if xxhash.xxh3_64_intdigest(data) != int(self.journal.checksums[layer, page]):
            self._fail(layer, page, MISMATCH)
        self.verified[layer, page] = True
        return data

    def _fail(self, layer: int, page: int, what: str) -> NoReturn:
        self.verified[layer, page] = False
        start, end = self.journal.block_of(page)
        number = first_page(self.info.start) + page
        raise CorruptPageError(
            f"KV page {number} of layer {layer} {what}",
            where=str(self.path),
            start=start,
            end=end,
        )

    def verify(self) -> Iterator[CorruptPageError | None]:
        """Checks every page again; yields every error, and None after each layer."""
        for layer in range(self.info.shape.num_layers):
            self.verified[layer] = False
            for page in range(self.num_pages):
                try:
                    self.check(layer, np.array([page]))
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
        self.journal.checksums[:, pages] = other.journal.checksums[:, pages]
        self.verified[:, pages] = other.verified[:, pages]
