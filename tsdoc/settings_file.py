"""Settings as YAML: the user's config file, profiles, and values of `--set`."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml
from yaml.error import MarkedYAMLError

from tsdoc.errors import UsageError
from tsdoc.regular import NotRegularError, open_regular
from tsdoc.terminal import visible_line

MAX_BYTES = 1_000_000
MAX_INT_CHARS = 40
SHOWN_PROBLEM = 200  # characters of what is wrong


class YAMLProblemError(ValueError):
    """What is wrong with a text, and on which line where that is known, counted from 1."""

    def __init__(self, message: str, line: int | None) -> None:
        super().__init__(message)
        self.line = line


def read_settings_file(path: Path) -> dict[Any, Any] | None:
    """Reads a YAML file of nested settings, not yet checked; None where there is no such file.

    Raises:
        UsageError: it cannot be read, is larger than `MAX_BYTES`, or is no YAML mapping.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        hint = "Save it as a file first." if isinstance(error, NotRegularError) else None
        message = f"cannot be read ({error.strerror})"
        raise UsageError(message, where=str(path), hint=hint) from error
    if len(data) > MAX_BYTES:
        raise UsageError(f"is larger than {MAX_BYTES:,} bytes", where=str(path))
    try:
        content = load_yaml(data)
    except YAMLProblemError as error:
        where = str(path) if error.line is None else f"{path}:{error.line}"
        raise UsageError(str(error), where=where) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError("must be a mapping of settings", where=str(path))
    return content


def load_yaml(text: str | bytes) -> object:
    """Returns the plain data that YAML describes.

    Raises:
        YAMLProblemError: it is not valid, names other than plain types, or gives a key twice.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except _RepeatedKeyError as error:
        raise YAMLProblemError(str(error.problem), _line(error)) from error
    except MarkedYAMLError as error:
        raise _problem(error.problem or str(error), _line(error)) from error
    except (
        # What the constructors of `!!int x`, `!!bool x`, `!!timestamp x` and the like raise.
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        ValueError,
        yaml.YAMLError,
    ) as error:
        raise _problem(str(error), None) from error


def _problem(reason: str, line: int | None) -> YAMLProblemError:
    shown = shorten(visible_line(" ".join(reason.split())), SHOWN_PROBLEM, placeholder="…")
    return YAMLProblemError(f"is not valid YAML ({shown})", line)


def _line(error: MarkedYAMLError) -> int | None:
    return None if error.problem_mark is None else error.problem_mark.line + 1


class _RepeatedKeyError(MarkedYAMLError):
    """A mapping gives a key twice, of which PyYAML would silently take the last."""


class _Loader(yaml.SafeLoader):
    """Refuses a repeated key, and an integer that is none of a setting's.

    A repeated key is looked for where mappings are composed: once they are constructed, keys that
    a merge (`<<`) brings in stand beside a mapping's own, which rightly replace them.

    Python reads a long integer of base 2, 8 or 16 that it then cannot print in an error, and needs
    time that grows as the square of its length for one of base 60.
    """

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                problem = f"{visible_line(key.value)} is given twice, first on line {lines[name]}"
                raise _RepeatedKeyError(problem=problem, problem_mark=key.start_mark)
            lines[name] = line
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > MAX_INT_CHARS:
            problem = f"an integer of more than {MAX_INT_CHARS} characters"
            raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
