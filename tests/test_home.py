"""Whose TSDOC_HOME is used."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tsdoc.errors import DiskFullError, ResourceError, StoreError, UsageError
from tsdoc.home import LARGER_FILES, NOT_WRITABLE, find_home, private_dir, write_error


def test_a_relative_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSDOC_HOME", "here")
    with pytest.raises(UsageError, match="absolute"):
        find_home()


def test_a_home_behind_a_link_is_the_users_own_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    monkeypatch.setenv("TSDOC_HOME", str(link))
    home = find_home()
    assert home.root == tmp_path / "real"
    private_dir(home.store)
    home.records.symlink_to(tmp_path)
    with pytest.raises(StoreError, match="is a link"):
        private_dir(home.records)


def test_a_home_that_cannot_be_written_is_said_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StoreError, match="Read-only file system") as caught:
        private_dir(tmp_path / "store")
    assert caught.value.hint == NOT_WRITABLE


def test_a_home_that_cannot_be_made_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made") as caught:
        private_dir(tmp_path / "file" / "home" / "models")
    assert caught.value.hint == NOT_WRITABLE


def test_a_home_for_which_the_disk_has_no_room_is_an_error_of_resources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ResourceError, match="the disk is full"):
        private_dir(tmp_path / "store")


def test_a_home_that_cannot_be_reached_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setenv("TSDOC_HOME", str(tmp_path / "home"))
    with monkeypatch.context() as patches:
        patches.setattr(Path, "exists", refuse)
        with pytest.raises(StoreError, match="Permission denied") as caught:
            find_home()
    assert caught.value.hint == NOT_WRITABLE


def test_a_home_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TSDOC_HOME", str(tmp_path))
    assert find_home().root == tmp_path
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(StoreError, match="another user"):
        find_home()


def test_a_home_that_is_a_file_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TSDOC_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="where a directory is needed"):
        find_home()


def test_a_limit_of_file_sizes_is_not_a_full_disk() -> None:
    error = write_error(OSError(errno.EFBIG, "File too large"), Path("kv.bin"), "saving KV pages")
    assert isinstance(error, DiskFullError)  # what is kept has no room: it goes on in memory
    assert "full" not in error.message
    assert error.hint == LARGER_FILES
