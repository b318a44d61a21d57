"""Deleting what the store holds, to make room or to tidy up: only names of our format."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tsdoc.errors import StoreError
from tsdoc.store.files import delete_dir, has_ours, named_dirs, store_error
from tsdoc.store.locks import Lock, try_exclusive
from tsdoc.store.manifest import ENTRY_FILES
from tsdoc.store.replacing import drop_temporary
from tsdoc.store.segment import SEGMENT_FILES
from tsdoc.store.survey import EntryUse, Survey, is_blank, survey_key

_USELESS = ("stale", "damaged", "orphan")


def in_use(entry: EntryUse) -> bool:
    """Tells whether a process has the entry open or is writing it."""
    if entry.status == "newer":
        return False
    try:
        with _locked(entry):
            return False
    except StoreError:
        return True
    except OSError:  # a read-only store
        return False


@contextlib.contextmanager
def _locked(entry: EntryUse) -> Iterator[None]:
    """Holds all locks of an entry and of what only it uses; StoreError when somebody else does."""
    names = [s.directory / "write.lock" for s in entry.exclusive]
    if entry.status != "orphan" and entry.directory.parent.name == "entries":
        names += [entry.directory / "writer.lock", entry.directory / "use.lock"]
    locks: list[Lock] = []
    try:
        for name in names:
            lock = try_exclusive(name)
            if lock is None:
                raise StoreError("is in use", where=str(entry.directory))
            locks.append(lock)
        yield
    finally:
        for lock in locks:
            lock.release()


def delete(entry: EntryUse) -> int:
    """Deletes an entry and the segments that only it names; returns the bytes freed.

    Segments go first and the manifest last, so that a crash in between leaves an entry that is
    listed as damaged and can be removed again. Call it under `StoreRoot.changing`.

    Raises:
        StoreError: it is in use, of a newer format, or cannot be deleted.
    """
    if entry.status == "newer":
        raise StoreError(
            "was written by a newer tsdoc and is left alone", where=str(entry.directory)
        )
    freed = 0
    try:
        with _locked(entry):
            for segment in entry.exclusive:
                delete_dir(segment.directory, SEGMENT_FILES)
                freed += segment.num_bytes
            for segment in entry.segments:
                segment.users.discard((entry.model_key, entry.entry_id))
            if entry.directory.exists() and entry.directory.parent.name == "entries":
                delete_dir(entry.directory, ENTRY_FILES)
    except OSError as error:
        raise store_error(error, entry.directory, "deleting") from error
    return freed


def make_room(
    state: Survey, target: int, *, keep: Collection[str], on_delete: Callable[[EntryUse], None]
) -> int:
    """Deletes what was used longest ago until at most `target` bytes are left.

    Stale, damaged and orphaned things go first; entries in `keep`, in use or of a newer format
    stay. Call it under `StoreRoot.changing`.

    Returns:
        Bytes that are left.
    """
    left = state.num_bytes
    order = sorted(state.entries, key=lambda e: (e.status not in _USELESS, e.last_used))
    waiting = [e for e in order if e.status != "newer" and e.entry_id not in keep]
    while left > target:
        # What shares every segment frees nothing until the others are gone.
        entry = next((e for e in waiting if e.exclusive or e.status in _USELESS), None)
        if entry is None:
            break
        waiting.remove(entry)
        with contextlib.suppress(StoreError):
            left -= delete(entry)
            on_delete(entry)
    return left


def tidy(directory: Path) -> None:
    """Removes what crashed or finished runs left in a key's directory.

    That is: empty and nameless things, and entries of which nothing was committed.
    Call it under `StoreRoot.changing`.
    """
    entries, _ = survey_key(directory)
    for entry in entries:
        if entry.status == "incomplete" and is_blank(entry.segments[-1].directory):
            with contextlib.suppress(StoreError):  # it is being computed
                delete(entry)
    for path in named_dirs(directory / "entries"):
        _drop_litter(path, "manifest.json", ("writer.lock", "use.lock"), ENTRY_FILES)
    for path in named_dirs(directory / "segments"):
        _drop_litter(path, "segment.json", ("write.lock",), SEGMENT_FILES)
    for path in (directory / "entries", directory / "segments"):
        with contextlib.suppress(OSError):
            path.rmdir()
    empty = not (directory / "entries").exists() and not (directory / "segments").exists()
    with contextlib.suppress(OSError):
        delete_dir(directory, ("model.json",) if empty else ())


def _drop_litter(
    directory: Path, head: str, lock_names: tuple[str, ...], names: tuple[str, ...]
) -> None:
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError, StoreError):
        if os.path.lexists(directory / head):
            drop_temporary(directory)
            return
        if not has_ours(directory, names):
            return
        for name in lock_names:
            lock = try_exclusive(directory / name)
            if lock is None:
                return
            stack.enter_context(lock)
        delete_dir(directory, names)
