"""Profiles: YAML files with settings for one model, carried inside the wheel.

A profile names settings as the user's config file does (`tsdoc.config`); what it leaves out keeps
the built-in value.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tsdoc
from tsdoc.errors import UsageError
from tsdoc.terminal import visible_line

if TYPE_CHECKING:
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
    """Returns the settings of a profile by groups, checked, without the values it leaves out.

    Args:
        name_or_path: The name of a shipped profile, or the path of a YAML file (with a `/` or
            ending in .yaml or .yml).

    Raises:
        UsageError: no such profile, no valid YAML, or a key or value that does not exist.
    """
    from tsdoc.config import by_groups, nested_layer, resolve_settings
    from tsdoc.settings_file import read_settings_file

    path = _find(name_or_path)
    raw = read_settings_file(path)
    if raw is None:
        raise UsageError("profile cannot be read (no such file)", where=str(path))
    layer = nested_layer(raw, origin=str(path))
    resolve_settings([layer])
    return by_groups(layer.values)


def check_settings(raw: Mapping[str, Any], *, where: str) -> Settings:
    """Validates settings by groups and returns them with built-in values filled in.

    Raises:
        UsageError: the first wrong key, with the nearest valid one, or the first wrong value.
    """
    from tsdoc.config import nested_layer, resolve_settings

    return resolve_settings([nested_layer(raw, origin=where)]).settings


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
