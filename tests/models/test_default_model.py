from __future__ import annotations

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
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_default(home) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    for name, recorded in [("tiny", "tiny"), ("hf:a/b@v1", "hf:a/b@v1"), ("m", f"{tmp_path}/m")]:
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


@pytest.mark.parametrize("text", ["", "[]", '{"name": "tiny"}'])
def test_a_damaged_record_says_how_to_write_it_anew(home: Home, text: str) -> None:
    set_default(home, "tiny")
    default_path(home).write_text(text)
    with pytest.raises(ModelError, match="damaged") as caught:
        read_default(home)
    assert caught.value.hint is not None
    assert "tsdoc models use" in caught.value.hint
