from __future__ import annotations

import hashlib
import os
import shutil
import time
from pathlib import Path

import pytest

from tsdoc.errors import ModelError
from tsdoc.home import Home
from tsdoc.models import fingerprint
from tsdoc.models.fingerprint import content_hash, model_fingerprint, tokenizer_fingerprint


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
    monkeypatch.setattr(fingerprint, "file_sha256", lambda path: "hashed again")
    assert content_hash(copy / "model.safetensors", home) == before


def test_a_file_that_changed_just_now_is_not_remembered(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    assert content_hash(path, home) == hashlib.sha256(b"x").hexdigest()
    assert not (home.models / "content-hashes.json").exists()


def test_a_damaged_cache_only_costs_hashing(home: Home, copy: Path) -> None:
    wait_a_grain()
    before = content_hash(copy / "model.safetensors", home)
    (home.models / "content-hashes.json").write_text('{"half": ')
    assert content_hash(copy / "model.safetensors", home) == before


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
