"""What the store holds, what that costs, and deleting it. Only names of our format are deleted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tsdoc.errors import DamagedStoreError, StoreError, StoreFormatError
from tsdoc.store.files import delete_dir, has_ours, named_dirs, read_json, store_error
from tsdoc.store.journal import HEADER_BYTES
from tsdoc.store.key import FORMAT
from tsdoc.store.locks import Lock, try_exclusive
from tsdoc.store.manifest import ENTRY_FILES, Manifest, read_manifest
from tsdoc.store.replacing import drop_temporary
from tsdoc.store.segment import SEGMENT_FILES, SegmentInfo, read_info

Status = Literal["complete", "incomplete", "damaged", "orphan", "stale", "newer"]

_USELESS = ("stale", "damaged", "orphan")


@dataclass(slots=True, kw_only=True)
class SegmentUse:
    """A segment's directory, as seen by a survey.

    Attributes:
        num_bytes: Its files, kv.bin counted at the size that is reserved or being reserved.
        users: Entries that name it, as (model key, entry id).
    """

    directory: Path
    num_bytes: int
    info: SegmentInfo | None
    status: Status
    users: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryUse:
    """An entry's directory (or a segment that no entry names), as seen by a survey.

    Attributes:
        status: "orphan" is a segment without an entry, kept because the same prompt revives it;
            "stale" was written by an older tsdoc, "newer" by a newer one.
        exclusive_bytes: What deleting it alone would free.
        num_bytes: With everything it shares.
        last_used: Seconds since the epoch.
    """

    model_key: str
    entry_id: str
    directory: Path
    status: Status
    manifest: Manifest | None
    problem: str
    segments: tuple[SegmentUse, ...]
    last_used: float

    @property
    def num_bytes(self) -> int:
        """Bytes of all its segments."""
        return sum(s.num_bytes for s in self.segments)

    @property
    def exclusive(self) -> list[SegmentUse]:
        """Segments that nothing else names."""
        me = (self.model_key, self.entry_id)
        return [s for s in self.segments if s.users <= {me} and s.status != "newer"]

    @property
    def exclusive_bytes(self) -> int:
        """What deleting it alone would free."""
        return sum(s.num_bytes for s in self.exclusive)

    @property
    def shared_with(self) -> list[str]:
        """Ids of the entries that name a segment of this one."""
        users = {entry_id for segment in self.segments for _, entry_id in segment.users}
        return sorted(users - {self.entry_id})


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """All entries and segments of a store at one moment."""

    entries: list[EntryUse]
    segments: list[SegmentUse]

    @property
    def num_bytes(self) -> int:
        """Everything, shared segments counted once."""
        return sum(segment.num_bytes for segment in self.segments)

    @property
    def shared_bytes(self) -> int:
        """Segments that several entries name, each counted once."""
        return sum(segment.num_bytes for segment in self.segments if len(segment.users) > 1)


def survey(key_dirs: Iterable[Path]) -> Survey:
    """Looks at every entry and segment; reads only their JSON files."""
    entries: list[EntryUse] = []
    segments: list[SegmentUse] = []
    for directory in key_dirs:
        found_entries, found_segments = _survey_key(directory)
        entries += found_entries
        segments += found_segments
    return Survey(entries=entries, segments=segments)


def _survey_key(directory: Path) -> tuple[list[EntryUse], list[SegmentUse]]:
    alien = _format_status(directory / "model.json")
    ours = [d for d in named_dirs(directory / "segments") if has_ours(d, SEGMENT_FILES)]
    segments = {d.name: _look_at_segment(d, alien) for d in ours}
    entries = []
    for path in named_dirs(directory / "entries"):
        manifest, status, problem = _look_at_entry(path, alien)
        named = [p.segment_id for p in manifest.parts] if manifest is not None else []
        held = tuple(segments[name] for name in dict.fromkeys(named) if name in segments)
        for segment in held:
            segment.users.add((directory.name, path.name))
        if status in ("complete", "incomplete") and _is_broken(manifest, held):
            status, problem = "damaged", "a segment it names is missing or damaged"
        if status is not None:
            entries.append(
                EntryUse(
                    model_key=directory.name,
                    entry_id=path.name,
                    directory=path,
                    status=status,
                    manifest=manifest,
                    problem=problem,
                    segments=held,
                    last_used=_last_used(path),
                )
            )
    # A manifest that cannot be read because it is newer may name any segment here.
    if not any(entry.status == "newer" for entry in entries):
        unused = [s for s in segments.values() if not s.users]
        entries += [_orphan(directory, s) for s in unused if not _is_unborn(s.directory)]
    return entries, list(segments.values())


def _is_unborn(segment: Path) -> bool:
    """Whether a run ended while it began a segment, which then holds nothing; see `tidy`."""
    return not any(os.path.lexists(segment / name) for name in ("segment.json", "kv.bin"))


def _format_status(path: Path) -> Status | None:
    try:
        read_json(path, "model")
    except StoreFormatError as error:
        return "newer" if error.version > FORMAT else "stale"
    except DamagedStoreError:
        return None  # it only serves readers of the directory; begin writes it anew
    return None


def _look_at_segment(directory: Path, alien: Status | None) -> SegmentUse:
    info: SegmentInfo | None = None
    status: Status = "complete"
    try:
        info = read_info(directory)
    except StoreFormatError as error:
        status = "newer" if error.version > FORMAT else "stale"
    except DamagedStoreError:
        status = "damaged"
    sizes = {name: _size(directory / name) for name in SEGMENT_FILES}
    if info is not None:
        sizes["kv.bin"] = max(sizes["kv.bin"], info.kv_bytes)
    return SegmentUse(
        directory=directory,
        num_bytes=sum(sizes.values()),
        info=info,
        status=alien or status,
    )


def _look_at_entry(path: Path, alien: Status | None) -> tuple[Manifest | None, Status | None, str]:
    try:
        manifest = read_manifest(path)
    except StoreFormatError as error:
        return None, "newer" if error.version > FORMAT else "stale", error.message
    except DamagedStoreError as error:
        return None, alien or "damaged", error.message
    if manifest is None:
        return None, None, ""
    return manifest, alien or ("complete" if manifest.complete else "incomplete"), ""


def _is_broken(manifest: Manifest | None, held: tuple[SegmentUse, ...]) -> bool:
    named = {p.segment_id for p in manifest.parts} if manifest is not None else set()
    return len(held) < len(named) or any(s.status != "complete" for s in held)


def _orphan(directory: Path, segment: SegmentUse) -> EntryUse:
    alien = segment.status in ("newer", "stale")
    return EntryUse(
        model_key=directory.name,
        entry_id=segment.info.entry_id if segment.info is not None else segment.directory.name,
        directory=segment.directory,
        status=segment.status if alien else "orphan",
        manifest=None,
        problem="" if segment.info is not None else "segment.json is missing or damaged",
        segments=(segment,),
        last_used=_last_used(segment.directory),
    )


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _last_used(directory: Path) -> float:
    for path in (directory / "use.lock", directory):
        with contextlib.suppress(OSError):
            return path.lstat().st_mtime
    return 0.0


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


def is_blank(segment: Path) -> bool:
    """Tells whether nothing was ever committed to a segment."""
    return _size(segment / "journal.bin") <= HEADER_BYTES


def tidy(directory: Path) -> None:
    """Removes what crashed or finished runs left in a key's directory.

    That is: empty and nameless things, and entries of which nothing was committed.
    Call it under `StoreRoot.changing`.
    """
    entries, _ = _survey_key(directory)
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
