"""Entries and segments as a survey finds them: who uses what of which, and what that costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tsdoc.store.manifest import Manifest
from tsdoc.store.segment import SegmentInfo
from tsdoc.store.tokens import tokens_bytes

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
