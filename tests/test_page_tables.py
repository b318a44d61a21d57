from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from tsdoc.page_tables import PART_BYTES, populate

SIZE = PART_BYTES + 3 * mmap.PAGESIZE + 5


def _resident_bytes(address: int) -> int:
    """Of the mapping that begins at `address`."""
    lines = iter(Path("/proc/self/smaps").read_text("utf-8").splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))
    raise AssertionError("it is not mapped")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_populated_has_its_page_tables(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(SIZE))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
    rows = np.frombuffer(mapped, dtype=np.uint8)
    address = rows.ctypes.data
    assert _resident_bytes(address) < SIZE // 2
    populate([(address + 100, SIZE - 100)])
    assert _resident_bytes(address) >= SIZE


def test_memory_that_is_not_mapped_is_passed_over() -> None:
    populate([(1 << 20, mmap.PAGESIZE)])
