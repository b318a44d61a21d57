"""Rates of the disk, and a page cache that is empty or known not to be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tsdoc.profile import disk

needs_linux = pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="needs Linux")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "store" / "kv.bin"
    path.parent.mkdir()
    path.write_bytes(os.urandom(1 << 20) * 96)
    return path


def test_rates_are_measured_and_nothing_is_left(large: Path, tmp_path: Path) -> None:
    assert disk.write_rate(tmp_path, 1) > 1e6
    assert disk.read_rate(large) > 1e6
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kv.bin", "store"]


@needs_linux
def test_a_file_that_stays_cached_is_noticed(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large.read_bytes()
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: None)
    assert not disk.leave_page_cache(large.parent)


@needs_linux
def test_an_answer_of_yes_means_that_reads_wait_for_the_disk(large: Path) -> None:
    before = large.read_bytes()
    if disk.leave_page_cache(large.parent):
        blocked = 0
        with large.open("rb", buffering=0) as file:
            for offset in range(0, len(before), 7 << 20):
                try:
                    os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT)
                except BlockingIOError:
                    blocked += 1
        assert blocked > 0
    assert large.read_bytes() == before
