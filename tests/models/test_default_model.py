from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.models.fakes import FakeHub
from tests.read_only import make_read_only
from tsdoc.errors import ModelError, StoreError, UsageError
from tsdoc.home import Home
from tsdoc.models.default_model import (
    choose_default,
    default_path,
    read_default,
    set_default,
    settings_of,
)

GB = 10**9
SIZES = ["0.5B", "1.5B", "7B", "14B", "32B"]


@pytest.fixture
def full_hub(hub: FakeHub, model_directory: Path) -> FakeHub:
    for size in SIZES:
        hub.repositories[f"Qwen/Qwen2.5-{size}-Instruct"] = model_directory
    return hub


@pytest.mark.parametrize(
    ("device_gb", "size"),
    [(0, "0.5b"), (4, "0.5b"), (8.5, "1.5b"), (25.8, "7b"), (85, "14b"), (150, "32b")],
)
def test_the_largest_model_that_fits_the_device_is_chosen(
    full_hub: FakeHub, device_gb: float, size: str
) -> None:
    chosen = choose_default(full_hub, int(device_gb * GB), offline=False)
    assert chosen.name == f"qwen2.5-{size}-instruct"
    assert settings_of(chosen.name).licence == "Apache-2.0"


def test_an_unreachable_hub_gives_embedded(full_hub: FakeHub) -> None:
    full_hub.online = False
    chosen = choose_default(full_hub, 0, offline=False)
    assert chosen.name == "embedded"
    assert "cannot be reached" in chosen.reason


def test_a_hub_without_the_model_gives_embedded(hub: FakeHub) -> None:
    assert choose_default(hub, 0, offline=False).name == "embedded"


def test_offline_asks_nobody(full_hub: FakeHub) -> None:
    assert choose_default(full_hub, 0, offline=True).name == "embedded"
    assert not full_hub.calls


def test_use_records_profiles_hub_names_and_absolute_paths(
    home: Home, model_directory: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_default(home) is None
    monkeypatch.chdir(model_directory.parent)
    for name, recorded in [
        ("tiny", "tiny"),
        ("hf:a/b@v1", "hf:a/b@v1"),
        (model_directory.name, str(model_directory)),
        (str(gguf_file), str(gguf_file)),
    ]:
        assert set_default(home, name) == read_default(home)
        default = read_default(home)
        assert default is not None
        assert default.name == recorded


def test_use_default_decides_anew(home: Home) -> None:
    set_default(home, "tiny")
    assert set_default(home, "default") is None
    assert read_default(home) is None
    set_default(home, "default")


def test_where_nothing_can_be_written_use_says_so(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.root.mkdir(mode=0o700)
    with monkeypatch.context() as patches:
        make_read_only(patches, home.root)
        assert set_default(home, "default") is None  # there is nothing to remove
        with pytest.raises(StoreError, match="recording the default model failed") as caught:
            set_default(home, "tiny")
        assert caught.value.hint == "Point TSDOC_HOME to a directory you can write."
    set_default(home, "tiny")
    make_read_only(monkeypatch, home.root)
    with pytest.raises(StoreError, match="removing the record"):
        set_default(home, "default")


@pytest.mark.parametrize("name", ["", " "])
def test_use_takes_no_empty_name_for_the_current_directory(home: Home, name: str) -> None:
    with pytest.raises(UsageError, match="neither a profile nor a path"):
        set_default(home, name)
    assert read_default(home) is None


def test_use_refuses_what_does_not_exist(home: Home) -> None:
    with pytest.raises(UsageError, match="neither a profile nor a path") as caught:
        set_default(home, "tinny")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Did you mean tiny? ")
    with pytest.raises(ModelError, match="must be written hf:ORG/NAME"):
        set_default(home, "hf:only-one-part")


def test_use_refuses_a_path_without_a_model_that_can_be_run(
    home: Home, tmp_path: Path, gguf_file: Path, model_directory: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    other = shutil.copytree(model_directory, tmp_path / "other")
    config = json.loads((other / "config.json").read_text("utf-8"))
    (other / "config.json").write_text(json.dumps(config | {"architectures": ["GemmaForCausalLM"]}))
    gemma = tmp_path / "gemma.gguf"
    gemma.write_bytes(gguf_file.read_bytes().replace(b"qwen2", b"gemma"))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_file.read_bytes()[:-1])
    for path, message in [
        (empty, "it has no config.json"),
        (other, "GemmaForCausalLM is not supported"),
        (gemma, "architecture gemma is not supported"),
        (cut, "cut.gguf: "),
    ]:
        with pytest.raises(ModelError, match=message):
            set_default(home, str(path))
    assert read_default(home) is None


def test_a_record_that_is_a_pipe_is_not_waited_for(home: Home) -> None:
    home.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.mkfifo(default_path(home))
    with pytest.raises(ModelError, match=r"damaged .*not a regular file"):
        read_default(home)


@pytest.mark.parametrize("text", ["", "[]", '{"name": "tiny"}', "[" * 200_000])
def test_a_damaged_record_says_how_to_write_it_anew(home: Home, text: str) -> None:
    set_default(home, "tiny")
    default_path(home).write_text(text)
    with pytest.raises(ModelError, match="damaged") as caught:
        read_default(home)
    assert caught.value.hint is not None
    assert "tsdoc models use" in caught.value.hint
