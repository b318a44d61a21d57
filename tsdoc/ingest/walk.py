"""The files of a folder as git sees them, without git.

Honours nested .gitignore files (those above the folder inside its work tree, too),
`.git/info/exclude` and the ignore file that git's configuration names. Files in the index count
even where a rule ignores them, as they do for git.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tsdoc.ingest.gitconfig import find_excludes_file
from tsdoc.ingest.gitignore import Rule, decide
from tsdoc.ingest.gitindex import find_git_folder, read_index
from tsdoc.ingest.ignorefiles import read_rules, read_small_file


@dataclass(slots=True)
class Listing:
    """Paths relative to the folder, `/` between parts (undecodable bytes as surrogates).

    Attributes:
        paths: Everything that is not ignored and is no folder; links and pipes too.
        unreadable: Folders that could not be listed.
        notes: What the user should know about how the listing was made.
    """

    paths: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Level:
    """Rules of one folder; `prefix` is its path from the work tree's root, "" or "a/b/"."""

    prefix: str
    rules: tuple[Rule, ...]


def find_work_tree(folder: Path) -> Path | None:
    """Returns the nearest folder at or above `folder` that holds `.git`."""
    for candidate in (folder, *folder.parents):
        if os.path.lexists(candidate / ".git"):
            return candidate
    return None


def walk(folder: Path, *, root: Path | None = None) -> Listing:
    """Lists a folder by the ignore rules that git would apply; `folder` is resolved.

    A repository inside the folder starts afresh: its own rules hold there, and no outer ones.
    `root` is the work tree the folder lies in; by default the nearest one, or the folder itself.
    """
    listing = Listing()
    _walk_tree(folder, root or find_work_tree(folder) or folder, "", listing)
    listing.paths.sort(key=lambda path: path.split("/"))
    return listing


def _walk_tree(folder: Path, root: Path, shown: str, listing: Listing) -> None:
    """Walks one repository (or plain folder); `shown` is its path within the whole listing."""
    inside = "" if root == folder else folder.relative_to(root).as_posix() + "/"
    tracked = read_index(root)
    levels = [_Level("", rules) for rules in _repository_rules(root)]
    names = _Names(shown, inside, listing)
    prefix = ""
    for part in inside.split("/")[:-1]:
        levels.append(_Level(prefix, read_rules(root / prefix / ".gitignore")))
        if _ignored(levels, prefix + part, folder=True):
            _add_tracked(root, inside.rstrip("/"), tracked, names)
            return
        prefix += f"{part}/"
    _walk_folder(root, inside, levels, tracked, names)


@dataclass(frozen=True, slots=True)
class _Names:
    """Turns paths from a work tree's root into paths of the listing."""

    shown: str
    inside: str
    listing: Listing

    def of(self, path: str) -> str:
        return self.shown + path.removeprefix(self.inside)


def _walk_folder(
    root: Path, prefix: str, levels: list[_Level], tracked: frozenset[str], names: _Names
) -> None:
    folder = root / prefix
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        names.listing.unreadable.append(names.of(prefix).rstrip("/") or ".")
        return
    levels = [*levels, _Level(prefix, read_rules(folder / ".gitignore"))]
    for entry in entries:
        path = prefix + entry.name
        if entry.name == ".git":
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        ignored = _ignored(levels, path, folder=is_folder)
        if is_folder and not ignored and os.path.lexists(folder / entry.name / ".git"):
            inner = folder / entry.name
            _walk_tree(inner, inner, names.of(path) + "/", names.listing)
        elif is_folder and not ignored:
            _walk_folder(root, path + "/", levels, tracked, names)
        elif is_folder:
            _add_tracked(root, path, tracked, names)
        elif not ignored or path in tracked:
            names.listing.paths.append(names.of(path))


def _add_tracked(root: Path, path: str, tracked: frozenset[str], names: _Names) -> None:
    """Adds what the index holds of an ignored folder: the folder itself if it is a submodule."""
    for name in tracked:
        full = root / name
        if name != path and not name.startswith(path + "/"):
            continue
        if full.is_symlink() or not full.is_dir():
            names.listing.paths.extend([names.of(name)] if os.path.lexists(full) else [])
        elif os.path.lexists(full / ".git"):
            _walk_tree(full, full, names.of(name) + "/", names.listing)


def _ignored(levels: list[_Level], path: str, *, folder: bool) -> bool:
    for level in reversed(levels):
        verdict = decide(level.rules, path[len(level.prefix) :], folder=folder)
        if verdict is not None:
            return verdict
    return False


def _repository_rules(root: Path) -> Iterator[tuple[Rule, ...]]:
    """Yields the weakest rules first: the user's, then the repository's private ones."""
    git_folder = find_git_folder(root)
    main = read_small_file(git_folder / "commondir", follow=False).strip()
    git_folder /= main  # of a linked work tree; otherwise there is no such file
    yield read_rules(root / find_excludes_file(git_folder), follow=True)
    yield read_rules(git_folder / "info" / "exclude", follow=True)
