"""Deleting what the store holds, to make room or to tidy up: only names of our format."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from tsdoc.errors import DamagedStoreError, StoreError
from tsdoc.store.cutting import cut_segment
from tsdoc.store.files import delete_dir, has_ours, named_dirs, store_error
from tsdoc.store.locks import is_held, try_exclusive
from tsdoc.store.manifest import ENTRY_FILES, read_manifest
from tsdoc.store.replacing import drop_temporary
from tsdoc.store.root import Warn
from tsdoc.store.segment import SEGMENT_FILES
from tsdoc.store.survey import is_blank, look_again, survey_key
from tsdoc.store.uses import EntryUse, SegmentUse, Survey, User
from tsdoc.store.votes_file import SHARES_FILE

_USELESS = ("stale", "damaged", "orphan")


def in_use(entry: EntryUse) -> bool:
    """Tells whether a process has the entry open or is writing it; changes nothing."""
    if entry.status == "newer":
        return False
    try:
        return any(map(is_held, _locks(entry)))
    except StoreError:
        return True
    except OSError:  # not to be read
        return False


def _locks(entry: EntryUse) -> list[Path]:
    """All locks of an entry and of what only it uses."""
    paths = [s.directory / "write.lock" for s in entry.exclusive]
    if entry.status != "orphan" and entry.directory.parent.name == "entries":
        paths += _entry_locks(entry.directory)
    return paths


def _entry_locks(directory: Path) -> list[Path]:
    return [directory / "writer.lock", directory / "use.lock"]


@contextlib.contextmanager
def _locked(paths: Sequence[Path], where: Path) -> Iterator[None]:
    """Holds locks; StoreError when somebody else holds one."""
    with contextlib.ExitStack() as stack:
        for path in paths:
            lock = try_exclusive(path)
            if lock is None:
                raise StoreError("is in use", where=str(where))
            stack.enter_context(lock)
        yield


def delete(entry: EntryUse, *, mine: Collection[User] = ()) -> int:
    """Deletes an entry and what only it uses; returns the bytes freed.

    Segments that only it names go first and the manifest last, so that a crash in between leaves an
    entry that is listed as damaged and can be removed again. Then what it shared is cut back to
    what the others use. Call it under `StoreRoot.changing`.

    Args:
        entry: Of a survey, which takes note.
        mine: Entries whose locks the caller holds, and of which nothing is open.

    Raises:
        StoreError: it is in use, of a newer format, or cannot be deleted.
    """
    if entry.status == "newer":
        raise StoreError(
            "was written by a newer tsdoc and is left alone", where=str(entry.directory)
        )
    exclusive, freed = entry.exclusive, 0
    try:
        with _locked(_locks(entry), entry.directory):
            for segment in exclusive:
                delete_dir(segment.directory, SEGMENT_FILES)
                freed += segment.num_bytes
            if entry.directory.exists() and entry.directory.parent.name == "entries":
                delete_dir(entry.directory, ENTRY_FILES)
    except OSError as error:
        raise store_error(error, entry.directory, "deleting") from error
    for segment in entry.segments:
        segment.users.pop(entry.user, None)
        segment.pins.discard(entry.user)
        if segment not in exclusive:
            freed += trim(segment, mine=mine)
    return freed


def trim(segment: SegmentUse, *, mine: Collection[User] = ()) -> int:
    """Takes out of a segment what no entry uses any more; returns the bytes freed.

    Where one of its entries is in use, it stays for the next time. Call it under
    `StoreRoot.changing`; for `mine` see `delete`.
    """
    if not segment.is_loose:
        return 0
    before, directory = segment.num_bytes, segment.directory
    users = {user: directory.parent.parent / "entries" / user[1] for user in segment.users}
    locks = [directory / "write.lock"]
    locks += [path for user in users.keys() - mine for path in _entry_locks(users[user])]
    with contextlib.suppress(OSError, StoreError), _locked(locks, directory):
        try:
            if segment.info is None or segment.status == "damaged":
                raise DamagedStoreError(segment.problem, where=str(directory))
            end = max(segment.users.values())
            cut_segment(directory, end, name=_name_of(users.values()))
        except DamagedStoreError:  # those that name it can use nothing of it
            delete_dir(directory, SEGMENT_FILES)
        for path in users.values():  # it tells of an index that is made again
            (path / SHARES_FILE).unlink(missing_ok=True)
    look_again(segment)
    return before - segment.num_bytes


def trim_all(segments: Iterable[SegmentUse], *, mine: Collection[User] = ()) -> int:
    """Makes the cuts that had to wait; returns the bytes freed. See `trim`."""
    return sum(trim(segment, mine=mine) for segment in segments)


def _name_of(users: Iterable[Path]) -> str:
    manifests = (read_manifest(user) for user in users)
    return next((manifest.name for manifest in manifests if manifest is not None), "")


def choose(
    state: Survey, target: int, *, keep: Collection[str], mine: Collection[User] = ()
) -> tuple[list[EntryUse], int]:
    """Finds what was used longest ago and has to go so that at most `target` bytes are left.

    Stale, damaged and orphaned things go first; entries in `keep`, in use or of a newer format
    stay. For `mine` see `delete`.

    Returns:
        What to delete, in order; bytes that are left then.
    """
    held = {e.user for e in state.entries if e.user not in mine and in_use(e)}
    order = sorted(state.entries, key=lambda e: (e.status not in _USELESS, e.last_used))
    waiting = [
        e for e in order if not (e.status == "newer" or e.entry_id in keep or e.user in held)
    ]
    chosen: list[EntryUse] = []
    gone: set[User] = set()
    left = state.num_bytes
    while left > target:
        gains = ((e, _gain(e, gone, held)) for e in waiting)
        # What shares everything frees nothing until the others are gone.
        found = next(((e, gain) for e, gain in gains if gain or e.status in _USELESS), None)
        if found is None:
            break
        entry, gain = found
        waiting.remove(entry)
        chosen.append(entry)
        gone.add(entry.user)
        left -= gain
    return chosen, left


def _gain(entry: EntryUse, gone: set[User], held: set[User]) -> int:
    """What deleting an entry frees once `gone` are; segments of those `held` cannot be cut."""
    mine = {*gone, entry.user}
    segments = [s for s in entry.segments if s.users.keys() <= mine or not held & s.users.keys()]
    return sum(s.bytes_without(gone) - s.bytes_without(mine) for s in segments)


def delete_all(
    entries: Iterable[EntryUse],
    on_delete: Callable[[EntryUse], None],
    *,
    mine: Collection[User] = (),
) -> int:
    """Deletes what `choose` found, but for what came into use meanwhile; returns the bytes freed.

    Call it under `StoreRoot.changing`; for `mine` see `delete`.
    """
    freed = 0
    for entry in entries:
        with contextlib.suppress(StoreError):
            freed += delete(entry, mine=mine)
            on_delete(entry)
    return freed


def warn_of_loose(segments: Iterable[SegmentUse], warn: Warn) -> None:
    """Says what could not be taken out of segments, and when it will be."""
    for segment in segments:
        if segment.is_loose:
            warn(
                "not_cut",
                str(segment.directory),
                "holds text that no entry needs any more; it goes with the next removal, "
                "once nobody uses what it shares",
            )


def tidy(directory: Path, *, mine: Collection[User] = ()) -> None:
    """Removes what crashed or finished runs left in a key's directory.

    That is: empty and nameless things, entries of which nothing was committed, and what of
    segments no entry uses any more. Call it under `StoreRoot.changing`; for `mine` see `delete`.
    """
    entries, segments = survey_key(directory)
    trim_all(segments, mine=mine)
    for entry in entries:
        if _is_blank(directory, entry):
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


def _is_blank(directory: Path, entry: EntryUse) -> bool:
    """Whether an entry was begun and nothing of its own was ever committed."""
    manifest = entry.manifest
    if manifest is None or manifest.complete or entry.status not in ("incomplete", "damaged"):
        return False
    return is_blank(directory / "segments" / manifest.parts[-1].segment_id)


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
