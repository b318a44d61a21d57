"""The files of a folder, by git where it can be asked and by the built-in walker otherwise."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tsdoc.ingest.walk import Listing, find_work_tree, walk

_GIT = (
    "git",
    # A repository's own configuration can name programs to run; these two would be run here.
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
    "--no-optional-locks",
    "ls-files",
    "-co",
    "--exclude-standard",
    "-z",
)
_GIT_S = 60
# Variables that would make git look at another repository than the folder's.
_REDIRECTING = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_LITERAL_PATHSPECS",
    "GIT_PREFIX",
)
_CLOSED_FOLDER = re.compile(rb"warning: could not open directory '(.*)/': ")


def list_folder(folder: Path) -> Listing:
    """Lists the files of a resolved folder, in path order, without those that git ignores.

    Files of submodules and of repositories inside the folder are listed as well. Where the folder
    is ignored as a whole by a repository around it, the folder counts as one that was asked for,
    and only the ignore files inside it hold.
    """
    if find_work_tree(folder) is None:
        return walk(folder)
    listing = Listing()
    why = _ask_git(folder, "", listing)
    if why is not None:
        listing = walk(folder)
        listing.notes.append(f"{why}; ignore rules were applied without git")
    if not listing.paths and find_work_tree(folder) != folder:
        listing = walk(folder, root=folder)
        if listing.paths:
            listing.notes.append("git ignores this folder as a whole; its files were read anyway")
    paths = {*listing.paths, *_special_files(folder, listing.paths)}
    listing.paths = sorted(paths, key=lambda path: path.split("/"))
    return listing


def _special_files(folder: Path, paths: list[str]) -> Iterator[str]:
    """Yields pipes, sockets and devices beside listed files: git says nothing of them."""
    parents = {"", *(path.rpartition("/")[0] for path in paths)}
    for parent in parents:
        try:
            entries = list(os.scandir(folder / parent))
        except OSError:
            continue
        for entry in entries:
            if not (entry.is_symlink() or entry.is_dir() or entry.is_file()):
                yield f"{parent}/{entry.name}" if parent else entry.name


def _ask_git(folder: Path, shown: str, listing: Listing) -> str | None:
    """Adds what git lists below `folder` to `listing`; returns why git could not, or None."""
    found = _run_git(folder)
    if isinstance(found, str):
        return found
    paths, closed = found
    listing.unreadable.extend(shown + path for path in closed)
    for path in paths:
        name = shown + path.rstrip("/")
        full = folder / path
        if not os.path.lexists(full):
            continue
        if full.is_symlink() or not full.is_dir():
            listing.paths.append(name)
        elif os.path.lexists(full / ".git") and _ask_git(full, name + "/", listing) is not None:
            inner = walk(full)
            listing.paths.extend(f"{name}/{path}" for path in inner.paths)
            listing.unreadable.extend(f"{name}/{path}" for path in inner.unreadable)
    return None


def _run_git(folder: Path) -> tuple[list[str], list[str]] | str:
    """Returns the paths and closed folders that git names, or the reason why it does not."""
    environment = {k: v for k, v in os.environ.items() if k not in _REDIRECTING}
    environment |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
    try:
        done = subprocess.run(
            _GIT,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_S,
            check=False,
        )
    except FileNotFoundError:
        return "git is not installed"
    except (OSError, subprocess.TimeoutExpired):
        return "git does not answer"
    if done.returncode == 0:
        closed = _CLOSED_FOLDER.findall(done.stderr)
        paths = [os.fsdecode(path) for path in done.stdout.split(b"\0") if path]
        return paths, [os.fsdecode(path) for path in closed]
    if b"dubious ownership" in done.stderr:
        return "the repository belongs to another user"
    return "git cannot read the repository"
