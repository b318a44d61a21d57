"""Settings in layers: where each value comes from, and what is wrong with one that does not fit.

Strongest first: command-line option, `--set key=value`, profile, the user's config file, built-in.
Keys are dotted (`answer.seed`). Nothing is read from the current directory or from a source.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from tsdoc.errors import UsageError
from tsdoc.settings import Settings
from tsdoc.settings_file import YAMLProblemError, load_yaml, read_settings_file

BUILT_IN = "built-in"
SHOWN_VALUE = 80  # characters of a value in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Values of one origin.

    Attributes:
        origin: Shown to the user: "option --seed", "--set", "profile tiny", a file's path.
        values: Dotted key to value, not yet checked against the schema's types.
    """

    origin: str
    values: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSettings:
    """Settings, and the origin of each of their values by dotted key."""

    settings: Settings
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, object, str]]:
        """Yields (key, value, origin) of every setting in the order of the schema."""
        for key in setting_keys():
            group, name = key.split(".", 1)
            value = getattr(getattr(self.settings, group), name)
            yield key, _plain(value), self.origins[key]


def setting_keys() -> list[str]:
    """Returns every dotted key in the order of the schema."""
    keys = []
    for group, field in Settings.model_fields.items():
        model = cast(type[BaseModel], field.annotation)
        keys += [f"{group}.{name}" for name in model.model_fields]
    return keys


def user_config_path() -> Path:
    """Returns where the user's config file is looked for; it need not exist."""
    import platformdirs

    return Path(platformdirs.user_config_dir("tsdoc", appauthor=False)) / "config.yaml"


def read_config_file(path: Path) -> Layer | None:
    """Reads a YAML file of nested settings; None where there is no such file.

    Raises:
        UsageError: it cannot be read, is no YAML mapping, or names an unknown setting.
    """
    content = read_settings_file(path)
    return None if content is None else nested_layer(content, origin=str(path))


def nested_layer(content: Mapping[Any, Any], *, origin: str) -> Layer:
    """Returns the layer that a nested mapping (a config file, a profile) describes.

    A key may be dotted as well, as `tsdoc config show` names it.

    Raises:
        UsageError: an unknown setting, one that is given twice, or a group that is not a mapping.
    """
    values: dict[str, object] = {}
    for key, value in _dotted(content, origin):
        if key in values:
            raise UsageError(f"{key} is given twice", where=origin)
        values[key] = value
    return Layer(origin=origin, values=values)


def _dotted(content: Mapping[Any, Any], origin: str) -> Iterator[tuple[str, object]]:
    for group, part in content.items():
        if "." in str(group):
            yield _known_key(str(group), origin), part
            continue
        if group not in Settings.model_fields:
            raise _unknown(str(group), origin)
        if not isinstance(part, dict):
            raise UsageError(f"{group} must be a mapping of settings", where=origin)
        for name, value in part.items():
            yield _known_key(f"{group}.{name}", origin), value


def assignment_layer(assignments: Sequence[str]) -> Layer:
    """Returns the layer of `--set key=value` options; the last of equal keys counts.

    `key` is dotted, a name that only one group has, or a group whose value is a mapping. `null` is
    None; a value that begins with a bracket is YAML.

    Raises:
        UsageError: no `=`, an unknown or ambiguous key, or broken YAML.
    """
    values: dict[str, object] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise UsageError("needs the form key=value", where=f"--set {assignment}")
        value = _parse_value(text.strip(), where=f"--set {assignment}")
        if isinstance(value, dict) and key.strip() in Settings.model_fields:
            values |= nested_layer({key.strip(): value}, origin="--set").values
        else:
            values[_full_key(key.strip())] = value
    return Layer(origin="--set", values=values)


def resolve_settings(layers: Sequence[Layer]) -> ResolvedSettings:
    """Merges layers, strongest first, over the built-in values.

    A layer that names another model drops what weaker layers say about the model (licence,
    wheels, …): those belong to the weaker layer's model.

    Raises:
        UsageError: an unknown key or a value that does not fit, with its key and origin.
    """
    values: dict[str, object] = {}
    origins = dict.fromkeys(setting_keys(), BUILT_IN)
    for layer in reversed(layers):
        if "model.source" in layer.values:
            for key in [key for key in values if key.startswith("model.")]:
                del values[key]
                origins[key] = BUILT_IN
        for key, value in layer.values.items():
            values[_known_key(key, layer.origin)] = value
            origins[key] = layer.origin
    try:
        settings = Settings.model_validate(by_groups(values))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(str(part) for part in first["loc"][:2])
        detail = "".join(f"[{part}]" for part in first["loc"][2:])
        message = first["msg"].removeprefix("Value error, ")
        if key:  # else it is about several settings
            message = f"{key}{detail} does not take {written(first['input'])}: {message}"
        given = dict.fromkeys(o for o in origins.values() if o != BUILT_IN)
        raise UsageError(message, where=origins.get(key, " and ".join(given))) from error
    return ResolvedSettings(settings=settings, origins=origins)


def by_groups(values: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Returns values by dotted key as a nested mapping."""
    tree: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        group, name = key.split(".", 1)
        tree.setdefault(group, {})[name] = value
    return tree


def written(value: object) -> str:
    """Returns a value as it is written in YAML, on one line that is cut where it is long."""
    try:
        text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
    except yaml.YAMLError:  # nothing that a file could hold
        text = str(value)
    return shorten(text.removesuffix("...\n"), SHOWN_VALUE, placeholder="…")


def _parse_value(text: str, *, where: str) -> object:
    if text in ("null", "none", "None", "~"):
        return None
    if not text.startswith(("[", "{")):
        return text
    try:
        return load_yaml(text)
    except YAMLProblemError as error:
        raise UsageError(str(error), where=where) from error


def _full_key(key: str) -> str:
    keys = setting_keys()
    matches = [known for known in keys if known == key or known.split(".", 1)[1] == key]
    if len(matches) > 1:
        raise UsageError(f"{key} is not unique: {' or '.join(matches)}", where="--set")
    return matches[0] if matches else _known_key(key, "--set")


def _known_key(key: str, origin: str) -> str:
    if key not in setting_keys():
        raise _unknown(key, origin)
    return key


def _unknown(key: str, origin: str) -> UsageError:
    """Names the nearest key: the same leaf elsewhere, a like key, or a like leaf."""
    by_leaf = {known.split(".", 1)[1]: known for known in setting_keys()}
    leaf = key.rsplit(".", 1)[-1]
    names = setting_keys() if "." in key else list(Settings.model_fields)
    near = [by_leaf[leaf]] if leaf in by_leaf else []
    near = near or difflib.get_close_matches(key, names, n=1, cutoff=0.75)
    near = near or [by_leaf[name] for name in difflib.get_close_matches(leaf, by_leaf, n=1)]
    hint = f"Did you mean {near[0]}?" if near else "`tsdoc config show` lists every setting."
    return UsageError(f"unknown setting {key!r}", where=origin, hint=hint)


def _plain(value: object) -> object:
    """Turns models inside a value into plain data, for tables and JSON."""
    if isinstance(value, BaseModel):
        return value.model_dump()
    return [_plain(part) for part in value] if isinstance(value, tuple) else value
