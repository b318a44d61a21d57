from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from tsdoc.errors import ModelError, ResourceError
from tsdoc.home import Home
from tsdoc.models import converted
from tsdoc.models.converted import find_converted, list_converted, make_converted


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make(home: Home, path: Path, log: Path | None = None, pause_s: float = 0) -> Path:
    def fetch(work: Path) -> Path:
        if log is not None:
            with log.open("a") as file:
                file.write("fetched\n")
        time.sleep(pause_s)
        return path

    return make_converted(
        home,
        gguf_sha256=digest_of(path),
        name="small",
        source=str(path),
        fetch=fetch,
        on_progress=lambda done, total: None,
    )


def hidden(home: Home) -> list[str]:
    return [path.name for path in home.models.iterdir() if path.name.startswith(".partial")]


def test_two_processes_convert_once(home: Home, gguf_file: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    processes = [context.Process(target=make, args=(home, gguf_file, log, 0.3)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert log.read_text() == "fetched\n"
    assert find_converted(home, digest_of(gguf_file)) is not None


def test_a_killed_conversion_leaves_no_model_and_is_cleaned_up(
    home: Home, gguf_file: Path, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    process = context.Process(target=make, args=(home, gguf_file, log, 60))
    process.start()
    while not log.exists():
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    assert find_converted(home, digest_of(gguf_file)) is None
    assert not list_converted(home)
    assert hidden(home)
    directory = make(home, gguf_file)
    assert (directory / "model.safetensors").exists()
    assert not hidden(home)


def test_a_failed_conversion_leaves_nothing(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="not a complete GGUF file"):
        make(home, path)
    assert find_converted(home, digest_of(path)) is None
    assert not hidden(home)


def test_a_directory_without_its_label_is_made_again(home: Home, gguf_file: Path) -> None:
    directory = make(home, gguf_file)
    (directory / "tsdoc-model.json").unlink()
    (directory / "model.safetensors").write_bytes(b"")
    assert make(home, gguf_file) == directory
    assert (directory / "model.safetensors").stat().st_size > 0


def test_a_full_disk_is_a_resource_error(
    home: Home, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(converted, "convert_gguf", full)
    with pytest.raises(ResourceError, match="disk is full"):
        make(home, gguf_file)
    assert not hidden(home)


def test_models_are_listed_and_private(home: Home, gguf_file: Path) -> None:
    directory = make(home, gguf_file)
    (model,) = list_converted(home)
    assert (model.name, model.directory) == ("small", directory)
    assert model.num_bytes > (directory / "model.safetensors").stat().st_size
    assert directory.stat().st_mode & 0o077 == 0
