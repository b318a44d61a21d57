"""What the store holds and what that costs, as seen from outside: nothing is opened or locked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tsdoc.errors import DamagedStoreError, StoreFormatError
from tsdoc.store.files import has_ours, is_own_file, named_dirs, read_json
from tsdoc.store.journal import HEADER_BYTES, least_bytes
from tsdoc.store.key import FORMAT
from tsdoc.store.manifest import MANIFEST_SINCE, Manifest, Part, read_manifest
from tsdoc.store.segment import SEGMENT_FILES, SegmentInfo, read_info
from tsdoc.store.tokens import peek_tokens, tokens_bytes

Status = Literal["complete", "incomplete", "damaged", "orphan", "stale", "newer"]

User = tuple[str, str]
"""An entry, as (model key, entry id)."""


@dataclass(slots=True, kw_only=True)
class SegmentUse:
    """A segment's directory, as seen by a survey.

    Attributes:
        sizes: Bytes of each of `SEGMENT_FILES`, 0 for what is not there or not ours.
        kv_bytes: What kv.bin takes, at the size that is reserved or being reserved.
        problem: Which file is missing or wrong, as far as that can be seen from outside.
        users: Entries that name it, and up to where they use it. Without any it is its own.
        pins: Listed entries that may need all of it, whether or not they name it.
    """

    directory: Path
    sizes: Mapping[str, int]
    kv_bytes: int
    info: SegmentInfo | None
    status: Status
    problem: str
    users: dict[User, int] = field(default_factory=dict)
    pins: set[User] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """What all its files take."""
        return sum(self.sizes.values()) - self.sizes["kv.bin"] + self.kv_bytes

    @property
    def is_loose(self) -> bool:
        """Whether it holds what no entry that is listed has a use for."""
        info = self.info
        if not self.users or self.pins or self.status in ("stale", "newer"):
            return False
        if info is None or self.status == "damaged":  # of no use to those that name it
            return True
        is_longer = self.sizes["tokens.bin"] > tokens_bytes(info.end, info.chunk_size)
        return is_longer or max(self.users.values(), default=info.end) < info.end

    def look_again(self) -> None:
        """Takes note of what became of its files."""
        now = look_at_segment(self.directory, None)
        self.sizes, self.kv_bytes, self.info = now.sizes, now.kv_bytes, now.info
        self.status, self.problem = now.status, now.problem

    def bytes_without(self, gone: Collection[User]) -> int:
        """What is left of it when the entries `gone` are deleted."""
        ends = [end for user, end in self.users.items() if user not in gone]
        if not ends and self.status != "newer":
            return 0
        if self.pins.difference(gone) or self.status == "newer":
            return self.num_bytes
        if self.status == "stale":  # cannot be cut: it goes with the last that used most of it
            return self.num_bytes if max(ends) == max(self.users.values()) else 0
        return self.bytes_up_to(max(ends)) if self.status == "complete" else 0

    def bytes_up_to(self, end: int) -> int:
        """The share of [start, `end`)."""
        if self.info is None:
            return self.num_bytes
        used, held = end - self.info.start, self.info.end - self.info.start
        return self.num_bytes * min(used, held) // held


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryUse:
    """An entry's directory (or a segment that no entry names), as seen by a survey.

    Attributes:
        status: "orphan" is a segment without an entry, kept because the same prompt revives it;
            "stale" was written by an older tsdoc, "newer" by a newer one.
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
    def user(self) -> User:
        """What its segments know it by."""
        return self.model_key, self.entry_id

    @property
    def num_bytes(self) -> int:
        """What is its own, and its part of what it shares."""
        me = self.user
        shared = (min(s.bytes_up_to(s.users[me]), s.bytes_without({me})) for s in self.segments)
        return self.exclusive_bytes + sum(shared)

    @property
    def exclusive(self) -> list[SegmentUse]:
        """Segments of which nothing is left without it."""
        return [s for s in self.segments if not s.bytes_without({self.user})]

    @property
    def exclusive_bytes(self) -> int:
        """What deleting it alone would free."""
        return sum(s.num_bytes - s.bytes_without({self.user}) for s in self.segments)

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
        """What several entries use of their segments, each counted once."""
        return sum(
            segment.bytes_up_to(sorted(segment.users.values())[-2])
            for segment in self.segments
            if len(segment.users) > 1
        )


def survey(key_dirs: Iterable[Path]) -> Survey:
    """Looks at every entry and segment; reads only their JSON files, of others takes the size."""
    entries: list[EntryUse] = []
    segments: list[SegmentUse] = []
    for directory in key_dirs:
        found_entries, found_segments = survey_key(directory)
        entries += found_entries
        segments += found_segments
    return Survey(entries=entries, segments=segments)


def survey_key(directory: Path) -> tuple[list[EntryUse], list[SegmentUse]]:
    """Looks at the entries and segments of one model key."""
    alien = _format_status(directory / "model.json")
    ours = [d for d in named_dirs(directory / "segments") if has_ours(d, SEGMENT_FILES)]
    segments = {d.name: look_at_segment(d, alien) for d in ours}
    entries = []
    for path in named_dirs(directory / "entries"):
        manifest, status, problem = _look_at_entry(path, alien)
        ends = {p.segment_id: p.end for p in manifest.parts} if manifest is not None else {}
        held = tuple(segments[name] for name in ends if name in segments)
        for segment in held:
            segment.users[directory.name, path.name] = ends[segment.directory.name]
        if manifest is not None and status in ("complete", "incomplete"):
            problem = _broken(manifest, segments)
            status = "damaged" if problem else status
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
    newer = {entry.user for entry in entries if entry.status == "newer"}
    listed = {entry.user for entry in entries}
    for segment in segments.values():
        segment.pins |= newer | ({(directory.name, _owner(segment))} & listed)
    if not newer:
        unused = [s for s in segments.values() if not s.users]
        entries += [_orphan(directory, s) for s in unused if not _is_unborn(s.directory)]
    return entries, list(segments.values())


def _owner(segment: SegmentUse) -> str:
    """Id of the entry whose prompt a segment holds; "" where that is lost."""
    if segment.info is not None:
        return segment.info.entry_id
    with contextlib.suppress(DamagedStoreError):
        return peek_tokens(segment.directory).entry_id
    return ""


def _is_unborn(segment: Path) -> bool:
    """Whether a run ended while it began a segment, which then holds nothing."""
    return not any(os.path.lexists(segment / name) for name in ("segment.json", "kv.bin"))


def _format_status(path: Path) -> Status | None:
    try:
        read_json(path, "model")
    except StoreFormatError as error:
        return "newer" if error.version > FORMAT else "stale"
    except DamagedStoreError:
        return None  # it only serves readers of the directory; begin writes it anew
    return None


def look_at_segment(directory: Path, alien: Status | None) -> SegmentUse:
    """Looks at one segment from outside; `alien` is what its model key's directory says."""
    info: SegmentInfo | None = None
    status: Status = "complete"
    problem = ""
    sizes = {name: _size(directory / name) for name in SEGMENT_FILES}
    kv_bytes = sizes["kv.bin"]
    try:
        info = read_info(directory)
    except StoreFormatError as error:
        status, problem = "newer" if error.version > FORMAT else "stale", error.message
    except DamagedStoreError:
        status, problem = "damaged", "segment.json is missing or damaged"
    else:
        reserved = _allocated(directory / "kv.bin") if info.is_cut else info.kv_bytes
        kv_bytes = reserved if info.is_cut else max(kv_bytes, reserved)
        problem = _wrong_size(info, sizes)
        status = "damaged" if problem else status
    return SegmentUse(
        directory=directory,
        sizes=sizes,
        kv_bytes=kv_bytes,
        info=info,
        status=alien or status,
        problem=problem,
    )


def _wrong_size(info: SegmentInfo, sizes: Mapping[str, int]) -> str:
    """Which file cannot be what it was, whether or not the segment is finished; "" for none."""
    least = tokens_bytes(info.end, info.chunk_size)
    wanted = {"tokens.bin": max(least, sizes["tokens.bin"]) if info.is_cut else least}
    if sizes["journal.bin"] > HEADER_BYTES:  # something is committed, so its room was reserved
        wanted["kv.bin"] = info.kv_bytes
    wrong = (_compare(name, sizes[name], size) for name, size in wanted.items())
    return next(filter(None, wrong), "")


def _compare(name: str, size: int, wanted: int, *, or_more: bool = False) -> str:
    if size == wanted:
        return ""
    if not size:
        return f"{name} is missing or empty"
    return f"{name} has {size:,} bytes instead of {wanted:,}{' or more' if or_more else ''}"


def _look_at_entry(path: Path, alien: Status | None) -> tuple[Manifest | None, Status | None, str]:
    try:
        manifest = read_manifest(path)
    except StoreFormatError as error:
        problem = f"manifest.json {error.message}"
        if error.version > FORMAT:
            return None, "newer", problem
        return _read_stale(path), "stale", problem
    except DamagedStoreError as error:
        return None, alien or "damaged", f"manifest.json {error.message}"
    if manifest is None:
        return None, None, ""
    return manifest, alien or ("complete" if manifest.complete else "incomplete"), ""


def _read_stale(path: Path) -> Manifest | None:
    """What an older tsdoc's manifest says belongs to its entry; None where that is lost."""
    with contextlib.suppress(DamagedStoreError, StoreFormatError):
        return read_manifest(path, oldest=MANIFEST_SINCE)
    return None


def _broken(manifest: Manifest, segments: Mapping[str, SegmentUse]) -> str:
    """Says what of an entry cannot be used, as far as that can be seen; "" where all can."""
    for part in manifest.parts:
        problem = _part_problem(part, segments.get(part.segment_id), whole=manifest.complete)
        if problem:
            return f"segments/{part.segment_id} {problem}"
    return ""


def _part_problem(part: Part, segment: SegmentUse | None, *, whole: bool) -> str:
    if segment is None:
        return "is missing"
    if segment.info is None or segment.status != "complete":
        return f"is {segment.status}: {segment.problem}"
    if part.end > segment.info.end:
        return f"is damaged: it was cut to {segment.info.end:,} tokens"
    if not whole:
        return ""
    info, sizes = segment.info, segment.sizes
    least = least_bytes(part.start, part.end, info.shape.num_layers)
    problem = _compare("kv.bin", sizes["kv.bin"], info.kv_bytes)
    if not problem and sizes["journal.bin"] < least:
        problem = _compare("journal.bin", sizes["journal.bin"], least, or_more=True)
    return f"is damaged: {problem}" if problem else ""


def _orphan(directory: Path, segment: SegmentUse) -> EntryUse:
    alien = segment.status in ("newer", "stale")
    info = segment.info
    entry_id = info.entry_id if info is not None else segment.directory.name
    segment.users[directory.name, entry_id] = info.end if info is not None else 0
    segment.pins.add((directory.name, entry_id))
    return EntryUse(
        model_key=directory.name,
        entry_id=entry_id,
        directory=segment.directory,
        status=segment.status if alien else "orphan",
        manifest=None,
        problem=segment.problem,
        segments=(segment,),
        last_used=_last_used(segment.directory),
    )


def _size(path: Path) -> int:
    try:
        info = path.lstat()
    except OSError:
        return 0
    return info.st_size if is_own_file(info) else 0


def _allocated(path: Path) -> int:
    """What a file with holes takes."""
    with contextlib.suppress(OSError):
        info = path.lstat()
        return min(info.st_size, 512 * info.st_blocks)
    return 0


def _last_used(directory: Path) -> float:
    for path in (directory / "use.lock", directory):
        with contextlib.suppress(OSError):
            return path.lstat().st_mtime
    return 0.0


def is_blank(segment: Path) -> bool:
    """Tells whether nothing was ever committed to a segment."""
    return _size(segment / "journal.bin") <= HEADER_BYTES
