"""Private files with a checksum, and what may stand in their place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tsdoc.prompt.files import read_checked, write_checked


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_checked(tmp_path / "file", {"name": "\udcff"})
    assert read_checked(tmp_path / "file") == {"name": "\udcff"}


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to(path.with_name("other")),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_bytes(path.with_name("other").read_bytes()[:-1]),
    ],
)
def test_nothing_else_is(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """Nor waited for."""
    write_checked(tmp_path / "other", {})
    make(tmp_path / "file")
    assert read_checked(tmp_path / "file") is None
