from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.models.conftest import Packaged, make_packaged
from tests.models.fakes import FakeHub, FakeIndex, User, access
from tests.read_only import make_read_only
from tsdoc.errors import ModelError, ResourceError, StoreError
from tsdoc.home import Home
from tsdoc.models.converted import list_converted
from tsdoc.models.default_model import read_default, set_default
from tsdoc.models.download_plan import disk_errors
from tsdoc.models.gguf_header import read_gguf_header
from tsdoc.models.locate import LocatedModel, locate_model, locate_tokenizer
from tsdoc.models.profiles import check_settings, load_profile
from tsdoc.settings import ModelSettings

SMALL_REPO = "Qwen/Qwen2.5-0.5B-Instruct"


def locate(
    settings: ModelSettings | str,
    home: Home,
    hub: FakeHub,
    *,
    index: FakeIndex | None = None,
    offline: bool = False,
    user: User | None = None,
) -> LocatedModel:
    if isinstance(settings, str):
        settings = ModelSettings(source=settings)
    return locate_model(
        settings,
        home,
        offline=offline,
        confirm=user or User(),
        access=access(hub, index),
    )


def assert_three_ways_on(error: ModelError) -> None:
    assert error.hint is not None
    assert "Three ways on" in error.hint
    for way in (" with network", "--set model.source=", "tsdoc models use"):
        assert way in error.hint


def test_a_directory_is_used_where_it_lies(home: Home, hub: FakeHub, model_directory: Path) -> None:
    model = locate(str(model_directory), home, hub, offline=True)
    assert model.directory == model_directory
    assert model.config.architecture == "qwen2"
    assert model.small
    assert model.announcement is None
    assert not hub.calls


def test_a_gguf_file_is_converted_once(home: Home, hub: FakeHub, gguf_file: Path) -> None:
    first = locate(str(gguf_file), home, hub, offline=True)
    made = (first.directory / "model.safetensors").stat().st_ino
    second = locate(str(gguf_file), home, hub, offline=True)
    assert first == second
    assert (second.directory / "model.safetensors").stat().st_ino == made
    assert first.directory.parent == home.models


def test_the_same_weights_give_the_same_fingerprint_from_every_source(
    home: Home, hub: FakeHub, gguf_file: Path, model_directory: Path
) -> None:
    converted = locate(str(gguf_file), home, hub)
    assert converted.fingerprint == locate(str(model_directory), home, hub).fingerprint


def test_a_packaged_model_is_fetched_checked_and_converted(
    home: Home, hub: FakeHub, packaged: Packaged
) -> None:
    user = User()
    settings = packaged.settings.model_copy(update={"note": "An unofficial copy."})
    model = locate(settings, home, hub, index=packaged.index, user=user)
    assert model.name == "Weights-0.1M"
    assert packaged.index.calls == ["weights0==1.0", "weights1==1.0"]
    (plan,) = user.plans
    assert "Weights-0.1M" in plan.question
    assert "Apache-2.0" in plan.question
    assert str(home.models) in plan.question
    assert plan.question.endswith(". An unofficial copy")
    # The second time nothing is asked or fetched, and no network is needed.
    again = locate(settings, home, hub, index=FakeIndex(), offline=True, user=user)
    assert again.directory == model.directory
    assert len(user.plans) == 1
    leftovers = [path for path in home.models.iterdir() if path.name.startswith(".partial")]
    assert not leftovers


def test_a_hub_model_is_downloaded_once(home: Home, hub: FakeHub, model_directory: Path) -> None:
    hub.repositories["org/small"] = model_directory
    user = User()
    model = locate("hf:org/small", home, hub, user=user)
    assert model.name == "org/small"
    assert user.plans[0].licence == "apache-2.0"
    assert hub.calls == ["describe org/small", "download org/small"]
    locate("hf:org/small", home, hub, offline=True, user=user)
    assert len(hub.calls) == 2


def test_a_tokenizer_comes_without_the_weights(
    home: Home, hub: FakeHub, model_directory: Path
) -> None:
    hub.repositories["org/small"] = model_directory
    directory = locate_tokenizer(
        ModelSettings(source="hf:org/small"),
        home,
        offline=False,
        confirm=User(),
        access=access(hub),
    )
    assert (directory / "tokenizer.json").exists()
    assert not (directory / "model.safetensors").exists()
    # The weights follow when they are needed.
    assert locate("hf:org/small", home, hub).directory == directory


def locate_tokenizer_of(settings: ModelSettings, home: Home, index: FakeIndex) -> tuple[Path, User]:
    user, hub = User(), FakeHub(cache=home.root / "hub", online=False)
    directory = locate_tokenizer(
        settings, home, offline=False, confirm=user, access=access(hub, index)
    )
    return directory, user


def test_the_tokenizer_of_a_packaged_model_comes_from_the_wheel_that_holds_the_header(
    home: Home, tmp_path: Path, gguf_file: Path, model_directory: Path
) -> None:
    first_tensor = min(tensor.offset for tensor in read_gguf_header(gguf_file).tensors.values())
    made = make_packaged(tmp_path, gguf_file.read_bytes(), at=first_tensor + 1)
    directory, user = locate_tokenizer_of(made.settings, home, made.index)
    assert made.index.calls == ["weights0==1.0"]
    assert [plan.download_bytes for plan in user.plans] == [500]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (directory / name).read_bytes() == (model_directory / name).read_bytes()
    assert not list(directory.glob("*.safetensors"))
    locate_tokenizer_of(made.settings, home, made.index)
    assert len(made.index.calls) == 1
    assert list_converted(home) == []


def test_a_header_that_reaches_into_the_next_wheel_is_joined(
    home: Home, tmp_path: Path, gguf_file: Path
) -> None:
    made = make_packaged(tmp_path, gguf_file.read_bytes(), at=1000)
    directory, _ = locate_tokenizer_of(made.settings, home, made.index)
    assert made.index.calls == ["weights0==1.0", "weights1==1.0"]
    assert (directory / "tokenizer.json").is_file()


def test_a_model_that_is_here_gives_its_own_tokenizer(home: Home, packaged: Packaged) -> None:
    hub = FakeHub(cache=home.root / "hub", online=False)
    model = locate(packaged.settings, home, hub, index=packaged.index)
    directory, user = locate_tokenizer_of(packaged.settings, home, FakeIndex())
    assert (directory, user.plans) == (model.directory, [])


def test_the_tokenizer_of_a_gguf_file_needs_only_its_header(home: Home, gguf_file: Path) -> None:
    directory, user = locate_tokenizer_of(ModelSettings(source=str(gguf_file)), home, FakeIndex())
    assert (directory / "tokenizer.json").is_file()
    assert not list(directory.glob("*.safetensors"))
    assert user.plans == []


def test_offline_says_three_ways_on(home: Home, hub: FakeHub, packaged: Packaged) -> None:
    for settings in (packaged.settings, ModelSettings(source="hf:org/small")):
        with pytest.raises(ModelError, match="--offline forbids") as caught:
            locate(settings, home, hub, index=packaged.index, offline=True)
        assert_three_ways_on(caught.value)
    assert not hub.calls
    assert not packaged.index.calls


def test_an_unreachable_hub_or_index_says_three_ways_on(
    home: Home, hub: FakeHub, packaged: Packaged
) -> None:
    hub.online = False
    with pytest.raises(ModelError, match="cannot be reached") as caught:
        locate("hf:org/small", home, hub)
    assert_three_ways_on(caught.value)
    with pytest.raises(ModelError, match="pip could not download") as caught:
        locate(packaged.settings, home, hub, index=FakeIndex())
    assert_three_ways_on(caught.value)


def test_ways_on_name_what_is_here(home: Home, hub: FakeHub) -> None:
    tiny = check_settings(load_profile("tiny"), where="tiny").model
    assert tiny.gguf_sha256 is not None
    directory = home.models / f"gguf-{tiny.gguf_sha256[:16]}-v1"
    directory.mkdir(parents=True)
    (directory / "tsdoc-model.json").write_text("{}")
    with pytest.raises(ModelError) as caught:
        locate("hf:org/small", home, hub, offline=True)
    assert caught.value.hint is not None
    assert "(here: tiny)" in caught.value.hint


def test_declining_a_download_stops(home: Home, hub: FakeHub, packaged: Packaged) -> None:
    with pytest.raises(ModelError, match="declined"):
        locate(packaged.settings, home, hub, index=packaged.index, user=User(agrees=False))
    assert not packaged.index.calls


def test_a_full_disk_is_said_before_the_download(
    home: Home, hub: FakeHub, packaged: Packaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ResourceError, match="0 MB are free"):
        locate(packaged.settings, home, hub, index=packaged.index)
    assert not packaged.index.calls


def test_a_home_that_cannot_be_made_is_said_before_the_download(
    tmp_path: Path, hub: FakeHub, packaged: Packaged
) -> None:
    (tmp_path / "file").write_text("")
    user = User()
    with pytest.raises(StoreError, match="cannot be made") as caught:
        locate(packaged.settings, Home(tmp_path / "file" / "home"), hub, user=user)
    assert caught.value.hint == "Point TSDOC_HOME to a directory you can write."
    assert user.plans == []


def test_a_model_that_cannot_be_written_says_what_to_do(home: Home) -> None:
    with (
        pytest.raises(ModelError, match="Read-only file system") as caught,
        disk_errors(home.models),
    ):
        raise OSError(errno.EROFS, "Read-only file system")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Point TSDOC_HOME")


def test_nobody_is_asked_for_a_download_to_where_nothing_can_be_written(
    packaged: Packaged, home: Home, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.models.mkdir(mode=0o700, parents=True)
    make_read_only(monkeypatch, home.root)
    user = User()
    with pytest.raises(ModelError, match="Read-only file system") as caught:
        locate(packaged.settings, home, hub, user=user)
    assert caught.value.where == str(home.models)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Point TSDOC_HOME")
    assert user.plans == []


def test_a_directory_needs_no_home_that_can_be_written(
    home: Home, hub: FakeHub, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = locate(str(model_directory), home, hub).fingerprint
    fresh = Home(home.root / "fresh")
    make_read_only(monkeypatch, fresh.root)
    assert locate(str(model_directory), fresh, hub).fingerprint == expected
    assert not fresh.root.exists()


def test_a_default_that_cannot_be_recorded_is_used_and_said(
    home: Home, hub: FakeHub, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[SMALL_REPO] = model_directory
    make_read_only(monkeypatch, home.root)
    model = locate("default", home, hub)
    assert model.name == SMALL_REPO
    assert model.announcement is not None
    assert "this time" in model.announcement
    assert "Read-only file system" in model.announcement
    assert read_default(home) is None


def test_default_without_a_hub_is_embedded_and_not_recorded_when_it_fails(
    home: Home, hub: FakeHub
) -> None:
    hub.online = False
    with pytest.raises(ModelError, match="pip could not download"):
        locate("default", home, hub, index=FakeIndex())
    assert read_default(home) is None


def test_default_is_decided_once_said_and_recorded(
    home: Home, hub: FakeHub, model_directory: Path
) -> None:
    hub.repositories[SMALL_REPO] = model_directory
    first = locate("default", home, hub)
    assert first.name == SMALL_REPO
    assert first.announcement is not None
    assert "tsdoc models use" in first.announcement
    hub.online = False
    hub.calls.clear()
    second = locate("default", home, hub)
    assert second.announcement is None
    assert second.fingerprint == first.fingerprint
    assert not hub.calls


def test_default_offline_is_not_recorded(home: Home, hub: FakeHub, model_directory: Path) -> None:
    hub.repositories[SMALL_REPO] = model_directory
    locate(f"hf:{SMALL_REPO}", home, hub)
    hub.calls.clear()
    assert locate("default", home, hub, offline=True).name == SMALL_REPO
    assert read_default(home) is None
    assert not hub.calls


def test_the_chosen_default_is_used(home: Home, hub: FakeHub, model_directory: Path) -> None:
    set_default(home, str(model_directory))
    assert locate("default", home, hub, offline=True).directory == model_directory


@pytest.mark.parametrize(
    ("source", "hint"),
    [("tiny", "--profile tiny"), ("org/small", "hf:org/small"), ("./none", "hf:ORG/NAME")],
)
def test_a_source_that_does_not_exist_is_explained(
    home: Home, hub: FakeHub, source: str, hint: str
) -> None:
    with pytest.raises(ModelError, match="no such file or directory") as caught:
        locate(source, home, hub)
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def test_no_pipe_is_waited_for(
    home: Home, hub: FakeHub, model_directory: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    directory = shutil.copytree(model_directory, tmp_path / "copy")
    (directory / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(directory / "generation_config.json")
    for path in (tmp_path / "model.gguf", directory):
        with pytest.raises(ModelError, match=r"cannot be read .*not a regular file"):
            locate(str(path), home, hub)


def test_a_pypi_source_needs_pinned_hashes(home: Home, hub: FakeHub) -> None:
    with pytest.raises(ModelError, match="pinned in a profile"):
        locate("pypi:anything", home, hub)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json"),
        ("model.safetensors", "model.safetensors is missing"),
    ],
)
def test_an_incomplete_directory_is_explained(
    home: Home, hub: FakeHub, model_directory: Path, tmp_path: Path, missing: str, words: str
) -> None:
    directory = shutil.copytree(model_directory, tmp_path / "copy")
    (directory / missing).unlink()
    with pytest.raises(ModelError, match=words):
        locate(str(directory), home, hub)


def test_pickle_weights_are_refused(
    home: Home, hub: FakeHub, model_directory: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(model_directory, tmp_path / "copy")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError) as caught:
        locate(str(directory), home, hub)
    assert caught.value.hint is not None
    assert "can run code" in caught.value.hint
