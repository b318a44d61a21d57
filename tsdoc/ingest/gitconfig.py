"""The user's ignore file as git finds it, read from git's configuration files without git.

Only `core.excludesFile` and `include.path` are looked at; everything else in these files, which may
be foreign, is passed over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tsdoc.ingest.ignorefiles import read_small_file

_SECTION = re.compile(r'[ \t]*\[[ \t]*([-.\w]+)[ \t]*(?:"((?:[^"\\]|\\.)*)"[ \t]*)?\][ \t]*')
_ENTRY = re.compile(r"[ \t]*([A-Za-z][-A-Za-z0-9]*)[ \t]*=[ \t]*(.*)")
_ESCAPES = {"n": "\n", "t": "\t", "b": "\b"}
_MAX_INCLUDES = 10


def find_excludes_file(git_folder: Path) -> Path:
    """Returns the ignore file that holds for all of the user's repositories; it may not exist.

    As for git, the last setting wins: system, user, then the repository's own.

    Args:
        git_folder: The `.git` of the repository; of its main work tree if there are several.
    """
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    found = config_home / "git" / "ignore"
    own = os.environ.get("GIT_CONFIG_GLOBAL")
    user = [Path(own)] if own else [config_home / "git" / "config", Path.home() / ".gitconfig"]
    for path in (Path("/etc/gitconfig"), *user, git_folder / "config"):
        for value in _excludes_files(path, _MAX_INCLUDES):
            found = value
    return found


def _excludes_files(path: Path, includes_left: int) -> Iterator[Path]:
    """Yields what a configuration file and those it includes set, in order."""
    for section, name, value in _entries(read_small_file(path, follow=True)):
        if (section, name) == ("core", "excludesfile"):
            yield _expanded(value)
        elif (section, name) == ("include", "path") and includes_left:
            yield from _excludes_files(path.parent / _expanded(value), includes_left - 1)


def _expanded(value: str) -> Path:
    try:
        return Path(value).expanduser()
    except RuntimeError:  # the home of a user that does not exist
        return Path(value)


def _entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields (section, name, value); names of sections with a subsection hold a dot."""
    section = ""
    for line in text.removeprefix("\ufeff").replace("\\\n", "").split("\n"):
        heading = _SECTION.match(line)
        if heading is not None:
            section = heading[1].lower() + (f".{heading[2]}" if heading[2] is not None else "")
            line = line[heading.end() :]
        entry = _ENTRY.match(line)
        if entry is not None:
            yield section, entry[1].lower(), _value(entry[2])


def _value(raw: str) -> str:
    """Returns a value without its quotes, escapes, comment and the white space around it."""
    out: list[str] = []
    kept = 0
    quoted = escaped = False
    for char in raw:
        if escaped:
            out.append(_ESCAPES.get(char, char))
            escaped, kept = False, len(out)
        elif char == "\\":
            escaped = True
        elif char == '"':
            quoted, kept = not quoted, len(out)
        elif char in "#;" and not quoted:
            break
        else:
            out.append(char)
            kept = len(out) if quoted or char not in " \t\r" else kept
    return "".join(out[:kept])
