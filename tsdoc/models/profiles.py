"""Profiles: YAML files with settings for one model, carried inside the wheel.

A profile has the structure of `tsdoc.settings.Settings`; what it leaves out keeps the built-in
value.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tsdoc
from tsdoc.errors import UsageError
from tsdoc.terminal import visible_line

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

    from tsdoc.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A profile that ships with tsdoc."""

    name: str
    path: Path


def list_profiles() -> list[Profile]:
    """Returns the profiles that ship with tsdoc, by name."""
    package = Path(tsdoc.__file__).parent
    inside = package / "_profiles"
    directory = inside if inside.is_dir() else package.parent / "profiles"
    return [Profile(name=path.stem, path=path) for path in sorted(directory.glob("*.yaml"))]


def load_profile(name_or_path: str) -> dict[str, Any]:
    """Returns the settings of a profile, checked, without the values it leaves out.

    Args:
        name_or_path: The name of a shipped profile, or the path of a YAML file (with a `/` or
            ending in .yaml or .yml).

    Raises:
        UsageError: no such profile, no valid YAML, or a key or value that does not exist.
    """
    path = _find(name_or_path)
    raw = _read(path)
    check_settings(raw, where=str(path))
    return raw


def check_settings(raw: Mapping[str, Any], *, where: str) -> Settings:
    """Validates raw settings (nested mappings) and returns them with built-in values filled in.

    Raises:
        UsageError: the first wrong key, with the nearest valid one, or the first wrong value.
    """
    from pydantic import ValidationError

    from tsdoc.settings import Settings

    try:
        return Settings.model_validate(raw)
    except ValidationError as error:
        raise _usage_error(error.errors(include_url=False)[0], where) from error


def _find(name_or_path: str) -> Path:
    profiles = {profile.name: profile.path for profile in list_profiles()}
    if name_or_path in profiles:
        return profiles[name_or_path]
    path = Path(name_or_path).expanduser()
    if "/" in name_or_path or path.suffix in (".yaml", ".yml"):
        return path
    near = difflib.get_close_matches(name_or_path, profiles, n=1)
    raise UsageError(
        f"no profile is called {visible_line(name_or_path)}",
        hint=(f"Did you mean {near[0]}? " if near else "")
        + f"Profiles: {', '.join(profiles)}; or the path of a .yaml file.",
    )


def _read(path: Path) -> dict[str, Any]:
    from tsdoc.settings_file import read_settings_file

    raw = read_settings_file(path)
    if raw is None:
        raise UsageError("profile cannot be read (no such file)", where=str(path))
    return raw


def _usage_error(detail: ErrorDetails, where: str) -> UsageError:
    from tsdoc.config import written

    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, list(_keys()), n=1, cutoff=0.5)
        return UsageError(
            f"unknown key {visible_line(key)}",
            where=where,
            hint=f"Did you mean {near[0]}?" if near else "`tsdoc config show` lists all keys.",
        )
    given = visible_line(written(detail["input"]))
    message = detail["msg"].removeprefix("Value error, ")
    return UsageError(f"{visible_line(key)}: {message} (given: {given})", where=where)


def _keys() -> Iterator[str]:
    """Yields every valid key: groups, and `group.name`."""
    from tsdoc.settings import Settings

    for group, field in Settings.model_fields.items():
        yield group
        model: type[BaseModel] = type(field.default)
        yield from (f"{group}.{name}" for name in model.model_fields)
