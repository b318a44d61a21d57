"""What `cache list` shows of an entry."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsdoc.errors import DamagedStoreError, StoreError, StoreFormatError
from tsdoc.store.eviction import in_use
from tsdoc.store.files import read_json
from tsdoc.store.segment import inspect_segment
from tsdoc.store.uses import EntryUse, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryInfo:
    """One entry of the store.

    Attributes:
        entry_id: 32 hex digits.
        model_key: Digest of the model key.
        model: The model key's fields, as far as they can be read.
        name: The name it was given; of foreign origin.
        committed_tokens: Tokens that a new run would not compute again.
        status: "complete", "incomplete", "damaged" (a file is missing or wrong), "orphan" (a
            segment whose entry is gone), "stale" (an older tsdoc's), "newer" (a newer tsdoc's).
        problem: Why it is not complete, where there is more to say.
        created: Seconds since the epoch.
        last_used: Seconds since the epoch.
        num_bytes: Size with what it shares with others.
        exclusive_bytes: What removing it alone would free.
        shared_with: Ids of the entries that it shares the rest with.
        in_use: A process has it open.
        prefill_block: Block size of the run that computed its last segment.
        sources: Names of what it was made from; of foreign origin.
        meta: Everything that was handed to `Store.begin`.
    """

    entry_id: str
    model_key: str
    model: Mapping[str, Any]
    name: str
    num_tokens: int
    committed_tokens: int
    status: Status
    problem: str
    created: float
    last_used: float
    num_bytes: int
    exclusive_bytes: int
    shared_with: tuple[str, ...]
    in_use: bool
    prefill_block: int
    sources: tuple[str, ...]
    meta: Mapping[str, Any]


def describe(entry: EntryUse, model: Mapping[str, Any]) -> EntryInfo:
    """Turns a survey's finding into what the user sees."""
    manifest = entry.manifest
    info = entry.segments[-1].info if entry.segments else None
    name = manifest.name if manifest is not None else (info.name if info is not None else "")
    num_tokens = manifest.num_tokens if manifest is not None else (info.end if info else 0)
    created = manifest.created if manifest is not None else (info.created if info else 0.0)
    meta = dict(manifest.meta) if manifest is not None else {}
    sources = meta.get("sources")
    return EntryInfo(
        entry_id=entry.entry_id,
        model_key=entry.model_key,
        model=model,
        name=name,
        num_tokens=num_tokens,
        committed_tokens=num_tokens if entry.status == "complete" else _committed(entry),
        status=entry.status,
        problem=entry.problem,
        created=created,
        last_used=entry.last_used,
        num_bytes=entry.num_bytes,
        exclusive_bytes=entry.exclusive_bytes,
        shared_with=tuple(entry.shared_with),
        in_use=in_use(entry),
        prefill_block=info.prefill_block if info is not None else 0,
        sources=tuple(map(str, sources)) if isinstance(sources, list) else (),
        meta=meta,
    )


def read_model(directory: Path) -> Mapping[str, Any]:
    """Returns the readable fields of a model key's directory; empty where they are lost."""
    with contextlib.suppress(DamagedStoreError, StoreFormatError):
        fields = read_json(directory / "model.json", "model").get("fields")
        if isinstance(fields, dict):
            return fields
    return {}


def _committed(entry: EntryUse) -> int:
    """Tokens committed along the chain of an entry, or in an orphaned segment."""
    manifest = entry.manifest
    ends = [part.end for part in manifest.parts] if manifest is not None else [1 << 31]
    end = 0
    for segment, limit in zip(entry.segments, ends, strict=False):
        if segment.status != "complete":
            break
        try:
            files = inspect_segment(segment.directory)
        except StoreError:
            break
        if manifest is not None and files.info.start != end:
            break
        end = min(files.committed, limit)
        if end < limit:
            break
    return end
