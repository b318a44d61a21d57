"""What the store holds and what that costs, as seen from outside: nothing is opened or locked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from tsdoc.errors import DamagedStoreError, StoreFormatError
from tsdoc.store.files import has_ours, is_own_file, named_dirs, read_json
from tsdoc.store.journal import HEADER_BYTES, least_bytes
from tsdoc.store.key import FORMAT
from tsdoc.store.manifest import MANIFEST_SINCE, Manifest, Part, read_manifest
from tsdoc.store.segment import SEGMENT_FILES, SegmentInfo, read_info
from tsdoc.store.tokens import peek_tokens, tokens_bytes
from tsdoc.store.uses import EntryUse, SegmentUse, Status, Survey


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


def look_again(segment: SegmentUse) -> None:
    """Takes note of what became of a segment's files."""
    now = look_at_segment(segment.directory, None)
    segment.sizes, segment.kv_bytes, segment.info = now.sizes, now.kv_bytes, now.info
    segment.status, segment.problem = now.status, now.problem


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
