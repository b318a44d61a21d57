"""YAML of settings: what is wrong with it is one line that names the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsdoc.settings_file import YAMLProblemError, load_yaml


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", "a is given twice, first on line 1", 3),
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", "b is given twice, first on line 2", 4),
        ("a:\n  b:\n    c: {d: 1, 'd': 2}\n", "d is given twice, first on line 3", 3),
        ("a:\n  - {b: 1}\n  - b: 1\n    b: 1\n", "b is given twice, first on line 3", 4),
        ("a: &x {b: 1, b: 2}\n", "b is given twice, first on line 1", 1),
        ("a:\n  <<: {b: 1, b: 2}\n", "b is given twice, first on line 2", 2),
        ("{[a]: {b: 1,\nb: 2}}", "b is given twice, first on line 1", 2),
    ],
)
def test_a_key_that_is_given_twice_is_refused_at_every_depth(
    text: str, message: str, line: int
) -> None:
    with pytest.raises(YAMLProblemError) as caught:
        load_yaml(text)
    assert (str(caught.value), caught.value.line) == (message, line)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: {x: 1}\nb: {x: 1}\n", {"a": {"x": 1}, "b": {"x": 1}}),
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n", {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}}),
        ("1: a\n'1': b\n", {1: "a", "1": "b"}),
    ],
)
def test_equal_names_that_are_not_one_key_are_taken(text: str, value: object) -> None:
    assert load_yaml(text) == value


def test_a_mapping_that_was_merged_can_be_merged_again() -> None:
    text = "a: &a {one: 1, two: 2}\nb: &b\n  <<: *a\n  one: 3\nc: {<<: *b, two: 4}\nd: {<<: *b}\n"
    assert load_yaml(text) == {
        "a": {"one": 1, "two": 2},
        "b": {"one": 3, "two": 2},
        "c": {"one": 3, "two": 4},
        "d": {"one": 3, "two": 2},
    }


@pytest.mark.parametrize(
    "text",
    [
        *("a: !!int x", "a: !!int ''", "a: !!bool x", "a: !!timestamp x", "a: !!float x"),
        *("a: 9999-99-99", "? {a: 1}\n: 2", "\x00", "a: !!python/name:os.system", "*a"),
        *("1" * 5000, "[" * 10_000),
        # Integers that Python reads and cannot print, and one that it reads in a second.
        *("0x" + "f" * 5000, "0" + "7" * 9000, "0b" + "1" * 20_000, "1" + ":10" * 60_000),
    ],
)
def test_what_is_wrong_is_one_line(text: str) -> None:
    with pytest.raises(YAMLProblemError, match=r"^is not valid YAML ") as caught:
        load_yaml(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


def test_the_shipped_profiles_give_no_key_twice() -> None:
    paths = list((Path(__file__).parents[1] / "profiles").glob("*.yaml"))
    assert paths
    for path in paths:
        assert isinstance(load_yaml(path.read_bytes()), dict)
