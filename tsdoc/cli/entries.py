"""Entries of the store on the command line: finding them by name, and telling about them."""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tsdoc.cli.reporter import duration
from tsdoc.cli.tables import Column
from tsdoc.errors import UsageError
from tsdoc.terminal import format_bytes, format_count, visible_line

if TYPE_CHECKING:
    from tsdoc.cli.run import Run
    from tsdoc.store.listing import EntryInfo

ID_SHOWN = 10
NAMES_SHOWN = 5
UNKNOWN = "unknown"


def find_entries(entries: Sequence[EntryInfo], names: Sequence[str]) -> list[EntryInfo]:
    """Returns the entries that are named, each once.

    A name is what `cache list` shows: the beginning of an id, or a document's name where only one
    entry has it.

    Raises:
        UsageError: a name fits none, or several.
    """
    found = [_find_entry(entries, name) for name in names]
    return list({entry.entry_id: entry for entry in found}.values())


def _find_entry(entries: Sequence[EntryInfo], name: str) -> EntryInfo:
    found = {entry.entry_id: entry for entry in entries if name and _is_called(entry, name)}
    if name in found:
        return found[name]
    if not found:
        raise UsageError(f"no entry is called {name!r}", hint=_what_there_is(entries, name))
    if len(found) > 1:
        which = _listed(_told_apart(list(found.values())))
        raise UsageError(f"{len(found)} entries are called {name!r}", hint=f"Give an id: {which}.")
    return next(iter(found.values()))


def _is_called(entry: EntryInfo, name: str) -> bool:
    shown = title(entry)
    # A narrow terminal cuts names; what was copied from there ends in "…".
    is_cut = name.endswith("…") and len(name) > 1 and shown.startswith(name[:-1])
    names = (entry.name, visible_line(entry.name), shown)
    return entry.entry_id.startswith(name) or name in names or is_cut


def _what_there_is(entries: Sequence[EntryInfo], name: str) -> str:
    """Names the entries, the likeliest first."""
    if not entries:
        return "Nothing is kept."
    likeness = [difflib.SequenceMatcher(None, name, entry.name).ratio() for entry in entries]
    order = sorted(range(len(entries)), key=lambda number: -likeness[number])
    which = _listed([f"{_short(entries[n])} ({title(entries[n])})" for n in order])
    return f"There is {which}." if len(entries) == 1 else f"There are {which}."


def _told_apart(entries: Sequence[EntryInfo]) -> list[str]:
    """Names each entry by its id, its length, its part, and in what else they differ."""
    keys = {key for entry in entries for key in entry.model}
    differ = {key for key in keys if len({str(entry.model.get(key)) for entry in entries}) > 1}
    named = []
    for entry in entries:
        # A model's name is a digest and RoPE a table: neither says anything on one line.
        settings = sorted((differ & entry.model.keys()) - {"model", "rope"})
        what = [f"{entry.num_tokens:,} tokens", _part(entry)]
        if "model" in differ:
            what.append(visible_line(str(entry.meta.get("model", ""))))
        what += [f"{key} {entry.model[key]}" for key in settings]
        named.append(f"{_short(entry)} ({', '.join(filter(None, what))})")
    return named


def _part(entry: EntryInfo) -> str:
    """What of its sources an entry holds; "" for all, and for what an earlier tsdoc kept."""
    return visible_line(str(entry.meta.get("part", "")))


def title(entry: EntryInfo) -> str:
    """Returns an entry's name and, of a part, which: "manual.pdf, pages 1-5"."""
    return ", ".join(filter(None, (visible_line(entry.name), _part(entry))))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMES_SHOWN
    text = ", ".join(names[:NAMES_SHOWN])
    return f"{text} and {more} more in `tsdoc cache list`" if more > 0 else text


def _short(entry: EntryInfo) -> str:
    return entry.entry_id[:ID_SHOWN]


def status(entry: EntryInfo) -> str:
    """Returns the status in words, with how far an incomplete entry is."""
    state: str = entry.status
    if entry.status == "incomplete" and entry.num_tokens:
        state = f"{100 * entry.committed_tokens // entry.num_tokens} % done"
    return f"{state}, in use" if entry.in_use else state


def is_foreign(entry: EntryInfo) -> bool:
    """Whether another version of tsdoc has written it: it is never read, so never damaged."""
    return entry.status in ("stale", "newer")


def note_foreign(run: Run, entries: Sequence[EntryInfo]) -> None:
    """Says what becomes of entries that were passed over because of who has written them."""
    stale = [entry for entry in entries if entry.status == "stale"]
    newer = [entry for entry in entries if entry.status == "newer"]
    if stale:
        run.reporter.note(
            f"{count(stale)} of an older tsdoc: never read, the first to go when room is needed"
            " (`tsdoc cache remove` frees it now); their documents are prefilled again"
        )
    if newer:
        run.reporter.note(f"{count(newer)} of a newer tsdoc: left alone")


def count(entries: Sequence[EntryInfo]) -> str:
    """Returns "1 entry" or "3 entries"."""
    return format_count(len(entries), "entry", "entries")


def age(since: float) -> str:
    """Returns how long ago a moment (seconds since the epoch) was: "8 s ago", "3 days ago"."""
    seconds = max(0.0, time.time() - since)
    if seconds < 2 * 86_400:
        return f"{duration(seconds)} ago" if seconds < 5400 else f"{seconds / 3600:.0f} h ago"
    return f"{seconds / 86_400:.0f} days ago"


def _moment(seconds: float) -> str:
    """Returns a moment (seconds since the epoch) as local date and time, and how long ago."""
    if not seconds:
        return UNKNOWN
    return f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(seconds))}, {age(seconds)}"


def describe_total(entries: Sequence[EntryInfo], *, num_bytes: int, shared_bytes: int) -> str:
    """Returns how many entries there are and what they take, each shared page counted once."""
    total = f"{count(entries)}, {format_bytes(num_bytes)}"
    if not shared_bytes:
        return total
    return f"{total}, of which {format_bytes(shared_bytes)} are shared and counted once"


def redo_s(entry: EntryInfo, rates: Mapping[str, float]) -> float | None:
    """Returns how long the tokens would take that removing the entry loses; None if unknown."""
    rate = rates.get(entry.model_key)
    if rate is None or not entry.num_bytes:
        return None
    return entry.committed_tokens * entry.exclusive_bytes / entry.num_bytes / rate


def redo(entry: EntryInfo, rates: Mapping[str, float]) -> str:
    """Returns `redo_s` in words, "–" where nothing is lost: all is shared, or of no use."""
    if not (entry.exclusive_bytes and entry.committed_tokens):
        return "–"
    seconds = redo_s(entry, rates)
    return "?" if seconds is None else duration(seconds)


def entry_json(entry: EntryInfo, rates: Mapping[str, float]) -> dict[str, object]:
    """Returns one entry as JSON."""
    return {**asdict(entry), "redo_s": redo_s(entry, rates)}


def show_entries(
    run: Run, entries: Sequence[EntryInfo], rates: Mapping[str, float], *, sharing: bool
) -> None:
    """Prints the table of `cache list`; sizes in two columns where some of them is shared."""
    rows = [
        (
            _short(entry),
            f"{entry.num_tokens:,}" if entry.num_tokens else "?",
            *(format_bytes(part) for part in _size_parts(entry)[: 2 if sharing else 1]),
            status(entry),
            age(entry.last_used),
            redo(entry, rates),
            title(entry),
        )
        for entry in entries
    ]
    columns = [
        Column(title="id"),
        Column(title="tokens", right=True),
        *(
            Column(title=title, right=True)
            for title in (("own", "shared") if sharing else ("size",))
        ),
        Column(title="status"),
        Column(title="last used"),
        Column(title="to redo", right=True),
        Column(title="document", below=True),
    ]
    run.terminal.table(columns, rows)


def show_entry(
    run: Run, entry: EntryInfo, entries: Sequence[EntryInfo], rates: Mapping[str, float]
) -> None:
    """Prints everything that is known of one of `entries`."""
    from tsdoc.models.config import describe_rope

    whole = entry.committed_tokens == entry.num_tokens or is_foreign(entry)
    done = "" if whole else f", of which {entry.committed_tokens:,} are computed"
    model = {**entry.model, "rope": describe_rope(entry.model.get("rope", UNKNOWN))}
    rows = [
        ("id", entry.entry_id),
        ("document", entry.name or UNKNOWN),
        *([("part", _part(entry))] if _part(entry) else []),
        ("status", ": ".join(filter(None, (status(entry), entry.problem or _meaning(entry))))),
        ("tokens", f"{entry.num_tokens:,}{done}" if entry.num_tokens else UNKNOWN),
        ("size", _describe_size(entry, entries)),
        ("to redo", redo(entry, rates)),
        ("created", _moment(entry.created)),
        ("last used", _moment(entry.last_used)),
        ("model", str(entry.meta.get("model", UNKNOWN))),
        *(("file", name) for name in entry.sources),
        ("model key", entry.model_key),
        *((f"  {key}", str(value)) for key, value in sorted(model.items())),
    ]
    run.terminal.table([Column(title="key"), Column(title="value", wraps=True)], rows)


def _describe_size(entry: EntryInfo, entries: Sequence[EntryInfo]) -> str:
    size = format_bytes(entry.num_bytes)
    own, shared = (format_bytes(part) for part in _size_parts(entry))
    if not entry.shared_with:
        return f"{size}; removing it frees {own}"
    others = [f"{_short(e)} ({title(e)})" for e in entries if e.entry_id in entry.shared_with]
    return f"{size}: {own} its own, freed by removing it; {shared} shared with {_listed(others)}"


def _meaning(entry: EntryInfo) -> str:
    """Returns what a status means that does not say it itself."""
    return "its entry is gone, its sources find the pages again" if entry.status == "orphan" else ""


def _size_parts(entry: EntryInfo) -> tuple[int, int]:
    """Returns the bytes that are an entry's own, and those that it shares with others."""
    return entry.exclusive_bytes, entry.num_bytes - entry.exclusive_bytes


def show_states(run: Run, states: Sequence[tuple[EntryInfo, str, str]]) -> None:
    """Prints what became of each entry: a word, and what was computed where anything was."""
    if not states:
        run.reporter.note(f"nothing is kept in {run.services.home().store}")
        return
    with_done = any(done for _, _, done in states)
    rows = [
        (
            _short(entry),
            state,
            *((done,) if with_done else ()),
            title(entry),
        )
        for entry, state, done in states
    ]
    columns = [Column(title="id"), Column(title="status")]
    columns += [Column(title="computed again", right=True)] if with_done else []
    run.terminal.table([*columns, Column(title="document", below=True)], rows)
