"""Nothing that is no regular file is waited for."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tsdoc.regular import NotRegularError, open_regular


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_file_and_a_link_to_it_are_opened(tmp_path: Path) -> None:
    path, link = tmp_path / "a", tmp_path / "link"
    path.write_bytes(b"text")
    link.symlink_to(path)
    for name in (path, link):
        with open_regular(name) as file:
            assert file.read() == b"text"
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(link, follow=False)


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "x"
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            server.bind(str(path))
        before = num_open()
        with pytest.raises(NotRegularError) as caught:
            open_regular(path)
        assert caught.value.strerror == "not a regular file"
        assert num_open() == before


def test_a_directory_and_a_missing_file_say_what_they_are(tmp_path: Path) -> None:
    before = num_open()
    with pytest.raises(IsADirectoryError) as caught:
        open_regular(tmp_path)
    assert caught.value.filename == str(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")
    assert num_open() == before
