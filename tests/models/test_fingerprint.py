from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tsdoc.errors import ModelError
from tsdoc.home import Home
from tsdoc.models import fingerprint
from tsdoc.models.fingerprint import (
    OnRead,
    content_hash,
    content_hashes,
    file_sha256,
    model_fingerprint,
    tokenizer_fingerprint,
)


@pytest.fixture
def copy(tmp_path: Path, model_directory: Path) -> Path:
    return Path(shutil.copytree(model_directory, tmp_path / "copy"))


def wait_a_grain() -> None:
    """The hash of a file that changed just now is not remembered."""
    time.sleep(fingerprint._GRAIN_NS / 1e9 + 0.02)


def test_copies_have_equal_fingerprints(home: Home, copy: Path, model_directory: Path) -> None:
    assert model_fingerprint(copy, home) == model_fingerprint(model_directory, home)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"]
)
def test_every_file_counts(home: Home, copy: Path, name: str) -> None:
    before = model_fingerprint(copy, home)
    with (copy / name).open("a") as file:
        file.write(" ")
    assert model_fingerprint(copy, home) != before


def test_replaced_weights_of_equal_size_and_time_are_noticed(home: Home, copy: Path) -> None:
    weights = copy / "model.safetensors"
    wait_a_grain()
    before = model_fingerprint(copy, home)
    info = weights.stat()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (info.st_size, info.st_mtime_ns)
    assert model_fingerprint(copy, home) != before


def test_unchanged_weights_are_hashed_once(
    home: Home, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_a_grain()
    before = content_hash(copy / "model.safetensors", home)
    monkeypatch.setattr(fingerprint, "file_sha256", lambda path, on_read: "hashed again")
    assert content_hash(copy / "model.safetensors", home) == before


def test_files_are_hashed_side_by_side(home: Home, tmp_path: Path) -> None:
    """Each once, also where two of them are one; what was read is said meanwhile."""
    paths = [tmp_path / name for name in ("a", "b", "a", "c")]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 1000)
    wait_a_grain()
    said: list[tuple[int, int]] = []
    found = content_hashes(paths, home, lambda done, total: said.append((done, total)))
    assert found == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert all(done <= total == 3000 for done, total in said)
    remembered = json.loads((home.models / "content-hashes.json").read_text())
    assert set(remembered) == {str(path) for path in paths}
    assert content_hashes(paths, home) == found


def test_one_file_that_cannot_be_read_stops_the_others(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not when they are done."""
    large, missing = tmp_path / "large", tmp_path / "pipe"
    large.write_bytes(bytes(10_000))
    os.mkfifo(missing)
    monkeypatch.setattr(fingerprint, "_PART_BYTES", 1)
    monkeypatch.setattr(fingerprint, "_SHOWN_S", 60)
    counts: list[int] = []

    def read_slowly(path: Path, on_read: OnRead) -> str:
        def on_part(count: int) -> None:
            on_read(count)
            counts.append(count)
            time.sleep(0.001)

        return file_sha256(path, on_part)

    monkeypatch.setattr(fingerprint, "file_sha256", read_slowly)
    with pytest.raises(ModelError, match="pipe"):
        content_hashes([large, missing], home)
    assert len(counts) < 10_000


def test_a_file_that_changed_just_now_is_not_remembered(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    assert content_hash(path, home) == hashlib.sha256(b"x").hexdigest()
    assert not (home.models / "content-hashes.json").exists()


class Meanwhile:
    """Does something to a file during the first `times` readings of it."""

    def __init__(self, change: Callable[[Path], None], times: int) -> None:
        self.readings = 0
        self._change, self._times = change, times

    def __call__(self, path: Path, on_read: OnRead) -> str:
        digest = file_sha256(path, on_read)
        self.readings += 1
        if self.readings <= self._times:
            time.sleep(0.02)  # more than the clock's grain, so that ctime shows it
            self._change(path)
        return digest


def make_link(path: Path) -> None:
    os.link(path, path.with_name(f"link {path.stat().st_nlink}"))


def write_secretly(path: Path) -> None:
    """Changes the content, and sets mtime back."""
    info = path.stat()
    path.write_bytes(bytes([path.read_bytes()[0] + 1]))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize("times", [1, 2])
def test_a_hard_link_made_meanwhile_changes_nothing(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")
    reader = Meanwhile(make_link, times)
    monkeypatch.setattr(fingerprint, "file_sha256", reader)
    assert content_hash(path, home) == hashlib.sha256(b"1").hexdigest()
    assert reader.readings == 2
    assert not (home.models / "content-hashes.json").exists()


def test_what_is_written_meanwhile_with_mtime_set_back_is_read(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")
    monkeypatch.setattr(fingerprint, "file_sha256", Meanwhile(write_secretly, 1))
    assert content_hash(path, home) == hashlib.sha256(b"2").hexdigest()


@pytest.mark.parametrize(
    ("change", "times"),
    [
        (write_secretly, 2),
        (lambda path: path.write_bytes(b"3"), 1),
        (lambda path: os.truncate(path, 0), 1),
    ],
)
def test_a_file_that_is_being_written_is_refused(
    home: Home,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    times: int,
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")
    monkeypatch.setattr(fingerprint, "file_sha256", Meanwhile(change, times))
    with pytest.raises(ModelError, match="changes while it is read"):
        content_hash(path, home)


@pytest.mark.parametrize("damage", ['{"half": ', "[" * 200_000, "5", '{"a": "\xff"}'])
def test_a_damaged_cache_only_costs_hashing(home: Home, copy: Path, damage: str) -> None:
    wait_a_grain()
    before = content_hash(copy / "model.safetensors", home)
    (home.models / "content-hashes.json").write_text(damage, "latin-1")
    assert content_hash(copy / "model.safetensors", home) == before


def test_what_is_remembered_has_to_be_a_hash(home: Home, copy: Path) -> None:
    wait_a_grain()
    weights, cache = copy / "model.safetensors", home.models / "content-hashes.json"
    before = content_hash(weights, home)
    remembered = json.loads(cache.read_text())
    remembered[str(weights)][1] = 5
    cache.write_text(json.dumps(remembered))
    assert content_hash(weights, home) == before
    assert json.loads(cache.read_text())[str(weights)][1] == before


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_cache_that_is_no_file_is_not_read(
    home: Home, copy: Path, make: Callable[[Path], None]
) -> None:
    home.models.mkdir(mode=0o700, parents=True, exist_ok=True)
    make(home.models / "content-hashes.json")
    weights = copy / "model.safetensors"
    assert content_hash(weights, home) == hashlib.sha256(weights.read_bytes()).hexdigest()


def test_the_tokenizer_has_its_own_fingerprint(copy: Path) -> None:
    before = tokenizer_fingerprint(copy)
    (copy / "config.json").write_text("{}")
    assert tokenizer_fingerprint(copy) == before
    (copy / "chat_template.jinja").write_text("other")
    assert tokenizer_fingerprint(copy) != before


def test_missing_files_are_model_errors(home: Home, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.safetensors is missing"):
        model_fingerprint(tmp_path, home)
    with pytest.raises(ModelError, match="cannot be read"):
        content_hash(tmp_path / "none", home)
