"""Filling page tables ahead: a mapped file that is in the page cache can then be read at once.

Otherwise every few pages that are read for the first time interrupt whoever reads them, which
takes several times as long as filling the tables of the whole file.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14
PART_BYTES = 32 << 20  # at a time: the process can map nothing else meanwhile


def populate(places: Iterable[tuple[int, int]]) -> None:
    """Reads mapped pages and fills their page tables, without the interpreter's lock.

    Where that cannot be done, they are filled when they are used, as ever.

    Args:
        places: Address and number of bytes, each of memory that stays mapped meanwhile.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for address, num_bytes in places:
        end = address + num_bytes
        for first in range(address - address % mmap.PAGESIZE, end, PART_BYTES):
            if madvise(first, min(PART_BYTES, end - first), POPULATE_READ) != 0:
                return
