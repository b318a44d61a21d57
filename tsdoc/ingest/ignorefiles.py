"""Small files of a repository and its user that say what git ignores."""

from __future__ import annotations

from pathlib import Path

from tsdoc.ingest.gitignore import Rule, parse_rules
from tsdoc.regular import open_regular

_LARGEST = 1024 * 1024


def read_rules(path: Path, *, follow: bool = False) -> tuple[Rule, ...]:
    """Reads an ignore file; one that `read_small_file` does not read gives no rules.

    Args:
        path: The file.
        follow: Whether it may be a link: for git a `.gitignore` may not, the user's file may.
    """
    return parse_rules(read_small_file(path, follow=follow))


def read_small_file(path: Path, *, follow: bool) -> str:
    """Returns a file's first MiB; empty for none, an unreadable one, a device or a link."""
    try:
        with open_regular(path, follow=follow) as file:
            return file.read(_LARGEST).decode("utf-8", "surrogateescape")
    except (OSError, ValueError):
        return ""
