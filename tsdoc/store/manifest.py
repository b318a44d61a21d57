"""Manifests: what entries are made of, and the readable form of model keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsdoc.errors import DamagedStoreError
from tsdoc.store.files import HEX_NAME, read_json
from tsdoc.store.key import FORMAT

ENTRY_FILES = ("votes.bin", "shares.bin", "manifest.json", "use.lock", "writer.lock")
"""Names in an entry's directory, in the order of deletion."""

MANIFEST_SINCE = 1
"""The format whose manifests were the first to have the fields that they have now."""

_MAX_PARTS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Positions [start, end) of a prompt, held by the segment `segment_id` that begins there."""

    segment_id: str
    start: int
    end: int

    def to_json(self) -> dict[str, Any]:
        """Returns the part as it is written."""
        return {"segment_id": self.segment_id, "start": self.start, "end": self.end}


def take_int(payload: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Returns an integer field within [low, high], or raises ValueError."""
    value = payload[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} {value!r}")
    return value


def take_str(payload: Mapping[str, Any], name: str) -> str:
    """Returns a text field, or raises ValueError."""
    value = payload[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} {value!r}")
    return value


def read_parts(value: object, end: int) -> tuple[Part, ...]:
    """Returns a chain that covers [0, end) without gaps, or raises ValueError."""
    if not isinstance(value, list) or len(value) > _MAX_PARTS:
        raise ValueError("parts are not a list of sensible length")
    parts = []
    at = 0
    for item in value:
        part = Part(
            segment_id=take_str(item, "segment_id"),
            start=take_int(item, "start", at, at),
            end=take_int(item, "end", at + 1, end),
        )
        if not HEX_NAME.fullmatch(part.segment_id):
            raise ValueError(f"segment_id {part.segment_id!r}")
        parts.append(part)
        at = part.end
    if at != end:
        raise ValueError(f"parts end at {at} instead of {end}")
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What manifest.json says of an entry.

    Attributes:
        entry_id: 32 hex digits from the token ids; the directory's name.
        name: Shown to the user; of foreign origin.
        parts: Segments that cover [0, num_tokens).
        complete: Whether every block was committed when it was written.
        created: Seconds since the epoch.
        meta: What the session wants to keep: sources, the record of their text, the model.
    """

    entry_id: str
    model_key: str
    name: str
    num_tokens: int
    parts: tuple[Part, ...]
    complete: bool
    created: float
    meta: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Returns the payload of manifest.json."""
        return {
            "entry_id": self.entry_id,
            "model_key": self.model_key,
            "name": self.name,
            "num_tokens": self.num_tokens,
            "segments": [part.to_json() for part in self.parts],
            "complete": self.complete,
            "created": self.created,
            "meta": dict(self.meta),
        }


def read_manifest(directory: Path, *, oldest: int = FORMAT) -> Manifest | None:
    """Reads the manifest of an entry; None where there is none.

    Raises:
        StoreFormatError: a format version before `oldest`, or a newer one than ours.
        DamagedStoreError: damaged, or of another directory.
    """
    path = directory / "manifest.json"
    if not path.exists() and not path.is_symlink():
        return None
    payload = read_json(path, "entry", oldest=oldest)
    try:
        num_tokens = take_int(payload, "num_tokens", 1, 1 << 31)
        manifest = Manifest(
            entry_id=take_str(payload, "entry_id"),
            model_key=take_str(payload, "model_key"),
            name=take_str(payload, "name"),
            num_tokens=num_tokens,
            parts=read_parts(payload["segments"], num_tokens),
            complete=payload["complete"] is True,
            created=float(payload["created"]),
            meta=payload["meta"] if isinstance(payload["meta"], dict) else {},
        )
        if not math.isfinite(manifest.created):
            raise ValueError(f"created {manifest.created}")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DamagedStoreError(f"holds an impossible value ({error})", where=str(path)) from error
    if manifest.entry_id != directory.name or manifest.model_key != directory.parent.parent.name:
        raise DamagedStoreError("belongs to another directory", where=str(path))
    return manifest
