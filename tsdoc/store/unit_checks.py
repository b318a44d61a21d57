"""Checks of single rows, by units.bin, without reading the pages that they lie in."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import xxhash

from tsdoc.store.journal import Journal, first_page
from tsdoc.store.key import PAGE_SIZE
from tsdoc.store.segment import SegmentInfo
from tsdoc.store.units import UnitTable


class UnitChecks:
    """What is known, by units, of a segment's rows.

    Args:
        info: Of the segment.
        journal: Says what the units are sealed with.
        table: Digests of the units.
        fd: A descriptor of kv.bin that is used for nothing else, and closed here.

    Attributes:
        verified: Which units were checked, [num_layers, units of all pages].
    """

    def __init__(self, info: SegmentInfo, journal: Journal, table: UnitTable, fd: int) -> None:
        self._info = info
        self._journal = journal
        self._table = table
        self._per_page = PAGE_SIZE // table.tokens
        # Units are numbered from those of the segment's first page on, which may begin before it.
        self._base = first_page(info.start) * self._per_page
        num_units = len(journal.block_end) * self._per_page
        self.verified = np.zeros((info.shape.num_layers, num_units), dtype=np.bool_)
        self._fd = fd
        if hasattr(os, "posix_fadvise"):  # the kernel is to read no more than it is asked for
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def doubtful_pages(self, layer: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Checks the units of `positions` (sorted), once each.

        Returns:
            Pages (numbers within the segment) with a unit that nothing vouches for here.
        """
        verified = self.verified[layer]
        numbers: npt.NDArray[np.int64] = np.unique(positions // self._table.tokens) - self._base
        numbers = numbers[~verified[numbers]]
        if not len(numbers):
            return numbers
        self._read_ahead(layer, numbers)
        cuts = np.flatnonzero(np.diff(numbers // self._per_page)) + 1
        doubtful = []
        for units in np.split(numbers, cuts):
            page = int(units[0]) // self._per_page
            good = self._good(layer, page, units)
            verified[units[good]] = True
            if not good.all():
                doubtful.append(page)
        return np.array(doubtful, dtype=np.int64)

    def _good(self, layer: int, page: int, units: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of a page's `units` are what was committed."""
        journal = self._journal
        digests = None
        if journal.block_end[page]:
            checksum = int(journal.checksums[layer, page])
            digests = self._table.digests(layer, page, checksum)
        if digests is None:
            return np.zeros(len(units), dtype=np.bool_)
        wanted = digests[units % self._per_page].tolist()
        found = [self._digest(layer, unit) for unit in units.tolist()]
        return np.array([a == b for a, b in zip(found, wanted, strict=True)], dtype=np.bool_)

    def _digest(self, layer: int, unit: int) -> int | None:
        """Of a unit as it is now; None where it cannot be read: the page's check says why."""
        offset, size = self._place(layer, unit, unit + 1)
        try:
            data = os.pread(self._fd, size, offset)
        except OSError:
            return None
        return int(xxhash.xxh3_64_intdigest(data)) if len(data) == size else None

    def _place(self, layer: int, first: int, last: int) -> tuple[int, int]:
        """Offset and size, in bytes, of units [first, last)."""
        tokens, info = self._table.tokens, self._info
        start = max((self._base + first) * tokens, info.start)
        return info.place(layer, start, min((self._base + last) * tokens, info.end))

    def _read_ahead(self, layer: int, numbers: npt.NDArray[np.int64]) -> None:
        """Lets the disk fetch all these units at once, rather than one after the other."""
        if not hasattr(os, "posix_fadvise"):
            return
        cuts = np.flatnonzero(np.diff(numbers) > 1)
        firsts = numbers[np.concatenate(([0], cuts + 1))]
        lasts = numbers[np.concatenate((cuts, [len(numbers) - 1]))] + 1
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            offset, size = self._place(layer, first, last)
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)
