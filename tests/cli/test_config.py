"""Layers of settings: order, origins, and what is said about a key or value that does not fit."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tsdoc.config import (
    Layer,
    assignment_layer,
    nested_layer,
    read_config_file,
    resolve_settings,
    setting_keys,
)
from tsdoc.errors import UsageError
from tsdoc.settings import Settings


def test_without_layers_everything_is_built_in() -> None:
    resolved = resolve_settings([])
    assert resolved.settings == Settings()
    assert set(resolved.origins) == set(setting_keys())
    assert set(resolved.origins.values()) == {"built-in"}


def test_the_first_layer_wins_and_origins_are_kept() -> None:
    layers = [
        Layer(origin="option --seed", values={"answer.seed": 1}),
        Layer(origin="--set", values={"answer.seed": 2, "answer.top_p": 0.5}),
        Layer(origin="profile x", values={"answer.top_p": 0.6, "selection.top_k": 64}),
    ]
    resolved = resolve_settings(layers)
    answer = resolved.settings.answer
    assert (answer.seed, answer.top_p, resolved.settings.selection.top_k) == (1, 0.5, 64)
    assert resolved.origins["answer.seed"] == "option --seed"
    assert resolved.origins["answer.top_p"] == "--set"
    assert resolved.origins["selection.top_k"] == "profile x"
    assert resolved.origins["answer.max_new_tokens"] == "built-in"


def test_another_model_drops_what_a_weaker_layer_says_of_its_own() -> None:
    profile = Layer(origin="profile x", values={"model.source": "pypi:x", "model.licence": "MIT"})
    option = Layer(origin="option --model", values={"model.source": "hf:A/B"})
    resolved = resolve_settings([option, profile])
    assert (resolved.settings.model.source, resolved.settings.model.licence) == ("hf:A/B", None)
    assert resolved.origins["model.licence"] == "built-in"


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("seed=3", "answer.seed", "3"),
        ("answer.seed = 3", "answer.seed", "3"),
        ("theta=null", "engine.theta", None),
        ("model.source=a=b", "model.source", "a=b"),
        ("wheels=[]", "model.wheels", []),
    ],
)
def test_assignments(text: str, key: str, value: object) -> None:
    assert assignment_layer([text]).values == {key: value}


def test_no_index_can_be_asked_for() -> None:
    profile = Layer(origin="profile x", values={"engine.index": "int4"})
    resolved = resolve_settings([assignment_layer(["index=none"]), profile])
    assert resolved.settings.engine.index == "none"


def test_the_last_of_equal_assignments_counts() -> None:
    assert assignment_layer(["seed=1", "answer.seed=2"]).values == {"answer.seed": "2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed", "key=value"),
        ("sede=1", "Did you mean answer.seed?"),
        ("answer.sed=1", "Did you mean answer.seed?"),
        ("selection.seed=1", "Did you mean answer.seed?"),
        ("zzz=1", "config show"),
        ("wheels=[", "not valid YAML"),
    ],
)
def test_wrong_assignments(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        assignment_layer([text])
    assert message in str(caught.value)
    assert "--set" in str(caught.value)


def test_every_leaf_name_can_be_given_alone_or_names_its_groups() -> None:
    for key in setting_keys():
        leaf = key.split(".")[1]
        if sum(other.split(".")[1] == leaf for other in setting_keys()) == 1:
            assert list(assignment_layer([f"{leaf}=null"]).values) == [key]
        else:
            with pytest.raises(UsageError, match="not unique"):
                assignment_layer([f"{leaf}=null"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"answr": {}}, "Did you mean answer?"),
        ({"answer": {"sed": 1}}, "Did you mean answer.seed?"),
        ({"seed": 1}, "Did you mean answer.seed?"),
        ({"answer": 3}, "answer must be a mapping"),
        ({7: {}}, "unknown setting '7'"),
    ],
)
def test_wrong_nested_settings_name_the_file(content: dict[object, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        nested_layer(content, origin="/etc/x.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("/etc/x.yaml: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("answer.top_p", 7),
        ("answer.temperature", math.inf),
        ("answer.temperature", "1e400"),
        ("selection.smoothing", 2),
        ("engine.device", "tpu"),
        ("answer.seed", "x"),
        ("model.wheels", [{"requirement": "x"}]),
    ],
)
def test_a_wrong_value_names_key_and_origin(key: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_settings([Layer(origin="the origin", values={key: value})])
    assert str(caught.value).startswith(f"the origin: {key}")
    assert "\n" not in str(caught.value)


def test_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    assert read_config_file(path) is None
    path.write_text("")
    assert read_config_file(path) == Layer(origin=str(path), values={})
    path.write_text("answer:\n  seed: 5\nengine: {theta: null}\n")
    layer = read_config_file(path)
    assert layer == Layer(origin=str(path), values={"answer.seed": 5, "engine.theta": None})


@pytest.mark.parametrize(
    "content",
    [
        b"a: [",
        b"- 1",
        b"\xff\xfe\x00",
        b"a: !!python/object/apply:os.system [true]",
        b"#" * 1_000_001,
    ],
)
def test_a_bad_config_file_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_config_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_file_that_is_a_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_config_file(tmp_path)


def test_config_show_tells_every_origin(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "config" / "tsdoc" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("answer: {top_p: 0.5}\n")
    profile = tmp_path / "my.yaml"
    profile.write_text("selection: {top_k: 64}\n")
    args = ("config", "show", "--profile", str(profile), "--set", "theta=null", "--seed", "4")
    value = cli(*args, "--json").json()
    found = {row["key"]: (row["value"], row["origin"]) for row in value["settings"]}
    assert value["schema"] == "tsdoc.config.show/1"
    assert found["answer.top_p"] == (0.5, str(file))
    assert found["selection.top_k"] == (64, f"profile {profile}")
    assert found["engine.theta"] == (None, "--set")
    assert found["answer.seed"] == (4, "option --seed")
    assert found["answer.max_new_tokens"] == (512, "built-in")
    assert (value["config_file"], value["config_file_exists"]) == (str(file), True)
    table = cli(*args).stdout
    assert any(line.split() == ["engine.theta", "null", "--set"] for line in table.splitlines())


def test_config_show_names_the_default_model(cli: Cli) -> None:
    assert "default model: chosen when it is first used" in cli("config", "show").stderr
    assert cli("models", "use", "tiny").code == 0
    assert "default model: tiny" in cli("config", "show").stderr


def test_a_wrong_config_file_stops_every_command_with_exit_2(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "config" / "tsdoc" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("answer: {sed: 1}\n")
    result = cli("ask", "a.txt", "Who?")
    assert result.code == 2
    assert result.stderr == (
        f"tsdoc: {file}: unknown setting 'answer.sed'. Did you mean answer.seed?\n"
    )


def test_a_pipe_is_not_waited_for(cli: Cli, tmp_path: Path) -> None:
    profile = tmp_path / "my.yaml"
    os.mkfifo(profile)
    result = cli("config", "show", "--profile", str(profile))
    said = "cannot be read (not a regular file). Save it as a file first."
    assert (result.code, result.stderr) == (2, f"tsdoc: {profile}: {said}\n")
    config = tmp_path / "config" / "tsdoc" / "config.yaml"
    config.parent.mkdir(parents=True)
    os.mkfifo(config)
    result = cli("ask", "a.txt", "Who?")
    assert (result.code, result.stderr) == (2, f"tsdoc: {config}: {said}\n")


def test_a_repeated_key_names_its_line(cli: Cli, tmp_path: Path) -> None:
    profile = tmp_path / "my.yaml"
    profile.write_text("selection:\n  top_k: 64\n  chunk_size: 64\n  top_k: 32\n")
    result = cli("config", "show", "--profile", str(profile))
    assert result.code == 2
    assert result.stderr == f"tsdoc: {profile}:4: top_k is given twice, first on line 2\n"
    result = cli("config", "show", "--set", "answer={seed: 1, seed: 2}")
    assert result.code == 2
    assert "--set answer={seed: 1, seed: 2}: seed is given twice" in result.stderr


def test_nothing_is_read_from_the_current_directory(cli: Cli, tmp_path: Path) -> None:
    for name in ("config.yaml", "tsdoc.yaml", ".tsdoc.yaml"):
        (tmp_path / name).write_text("answer: {seed: 9}\n")
    value = cli("config", "show", "--json").json()
    assert {row["origin"] for row in value["settings"]} == {"built-in"}


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("top_k=abc", "--set: selection.top_k does not take abc: "),
        ("top_k=null", "--set: selection.top_k does not take null: "),
        ("model.wheels=[{member: true}]", "does not take {member: true}: "),
        ("prefill_block=100", "--set: prefill_block 100 is not a multiple of 512"),
    ],
)
def test_a_wrong_value_is_shown_as_it_is_written(cli: Cli, assignment: str, words: str) -> None:
    result = cli("config", "show", "--set", assignment)
    assert result.code == 2
    assert words in result.stderr


@pytest.mark.parametrize("width", [60, 80])
def test_config_show_cuts_nothing(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    file = tmp_path / "config" / "tsdoc" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("answer: {seed: 1}\n")
    shown = cli("config", "show", "--profile", "embedded", terminal=True).stdout
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    lines = shown.splitlines()
    seed = next(number for number, line in enumerate(lines) if line.startswith("answer.seed"))
    origin = "".join(line[lines[0].index("origin") :] for line in lines[seed:])
    assert str(file) in origin
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines if line[0] != " "}
    assert rows["model.wheels"].startswith("6 items; --json")


def test_a_file_may_name_settings_as_they_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("answer.evidence: 2\nengine:\n  theta: 0.5\nstore.max_bytes: 10GB\n")
    layer = read_config_file(path)
    assert layer is not None
    settings = resolve_settings([layer]).settings
    assert (settings.answer.evidence, settings.engine.theta) == (2, 0.5)
    assert settings.store.max_bytes == 10**10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"answer.sed": 1}, "Did you mean answer.seed?"),
        ({"answer.seed": 1, "answer": {"seed": 2}}, "answer.seed is given twice"),
    ],
)
def test_wrong_dotted_settings(content: dict[object, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        nested_layer(content, origin="/etc/x.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["store.max_bytes", "engine.device_memory"])
def test_sizes_are_taken_as_they_are_shown(key: str) -> None:
    for text, size in (("1.5 GB", 1_500_000_000), ("500MB", 500_000_000), ("7", 7)):
        rows = resolve_settings([assignment_layer([f"{key}={text}"])]).rows()
        assert {name: value for name, value, _ in rows}[key] == size
    for text in ("10XB", "-1", "0", "many"):
        with pytest.raises(UsageError, match=key):
            resolve_settings([assignment_layer([f"{key}={text}"])])
