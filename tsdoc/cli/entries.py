"""Entries of the store on the command line: finding them by their ids, and telling about them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tsdoc.cli.reporter import duration
from tsdoc.errors import StoreError, UsageError
from tsdoc.terminal import format_count

if TYPE_CHECKING:
    from tsdoc.store.listing import EntryInfo
    from tsdoc.store.store import Store


def find_entries(store: Store, prefixes: Sequence[str]) -> list[EntryInfo]:
    """Returns the entries that ids, or beginnings of ids, name.

    Raises:
        StoreError: there is none.
        UsageError: there are several.
    """
    entries = store.list()
    found: dict[str, EntryInfo] = {}
    for prefix in prefixes:
        matches = [entry for entry in entries if entry.entry_id.startswith(prefix)]
        if not matches or not prefix:
            raise StoreError(
                f"there is no entry {prefix!r}", hint="`tsdoc cache list` shows the ids."
            )
        if len(matches) > 1:
            raise UsageError(
                f"{len(matches)} entries begin with {prefix!r}", hint="Give more of it."
            )
        found[matches[0].entry_id] = matches[0]
    return list(found.values())


def status(entry: EntryInfo) -> str:
    """Returns the status in words, with how far an incomplete entry is."""
    state: str = entry.status
    if entry.status == "incomplete" and entry.num_tokens:
        state = f"{100 * entry.committed_tokens // entry.num_tokens} % done"
    return f"{state}, in use" if entry.in_use else state


def count(entries: Sequence[EntryInfo]) -> str:
    """Returns "1 entry" or "3 entries"."""
    return format_count(len(entries), "entry", "entries")


def age(since: float) -> str:
    """Returns how long ago a moment (seconds since the epoch) was: "8 s ago", "3 days ago"."""
    seconds = max(0.0, time.time() - since)
    if seconds < 2 * 86_400:
        return f"{duration(seconds)} ago" if seconds < 5400 else f"{seconds / 3600:.0f} h ago"
    return f"{seconds / 86_400:.0f} days ago"


def date(moment: float) -> str:
    """Returns a moment (seconds since the epoch) as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def redo_s(entry: EntryInfo, rates: Mapping[str, float]) -> float | None:
    """Returns how long the tokens would take that removing the entry loses; None if unknown."""
    rate = rates.get(entry.model_key)
    if rate is None or not entry.num_bytes:
        return None
    return entry.committed_tokens * entry.exclusive_bytes / entry.num_bytes / rate


def redo(entry: EntryInfo, rates: Mapping[str, float]) -> str:
    """Returns `redo_s` in words."""
    seconds = redo_s(entry, rates)
    return "?" if seconds is None else duration(seconds)


def entry_json(entry: EntryInfo, rates: Mapping[str, float]) -> dict[str, object]:
    """Returns one entry as JSON."""
    return {**asdict(entry), "redo_s": redo_s(entry, rates)}
