"""`tsdoc cache`: what is kept on disk, and getting rid of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tsdoc.cli.command import command
from tsdoc.cli.options import Tuning
from tsdoc.cli.reporter import amount, duration
from tsdoc.cli.run import Run
from tsdoc.errors import StoreError, UsageError

if TYPE_CHECKING:
    from tsdoc.store.listing import EntryInfo
    from tsdoc.store.store import Store

ID_SHOWN = 10

Ids = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ID...",
        help="Ids of entries as `tsdoc cache list` shows them, or how they begin.",
        show_default=False,
    ),
]
EntryId = Annotated[str, typer.Argument(metavar="ID", help="The id of an entry, or how it begins.")]
All = Annotated[bool, typer.Option("--all", help="All entries.")]
MaxBytes = Annotated[
    int | None,
    typer.Option(
        "--max-bytes", metavar="BYTES", min=0, help="Keep at most this; default: store.max_bytes."
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Registers the group `cache`."""
    group = typer.Typer(help="What is kept on disk for later questions.", no_args_is_help=True)
    app.add_typer(group, name="cache", rich_help_panel="Setup")
    command(
        group,
        name="list",
        usage="[OPTIONS]",
        examples=[("What is kept, and how much it takes", "tsdoc cache list")],
    )(cache_list)
    command(
        group,
        name="show",
        usage="ID [OPTIONS]",
        examples=[("All about one entry", "tsdoc cache show 3f9a21")],
    )(cache_show)
    command(
        group,
        name="remove",
        usage="ID... [OPTIONS]",
        examples=[
            ("Remove one entry", "tsdoc cache remove 3f9a21"),
            ("Remove everything", "tsdoc cache remove --all"),
        ],
    )(cache_remove)
    command(
        group,
        name="prune",
        usage="[OPTIONS]",
        examples=[("Keep the last used 10 GB", "tsdoc cache prune --max-bytes 10000000000")],
    )(cache_prune)
    command(
        group,
        name="verify",
        usage="[ID...] [OPTIONS]",
        examples=[("Read every page and check it", "tsdoc cache verify")],
    )(cache_verify)


def cache_list(run: Run) -> None:
    """List what is kept, last used first."""
    entries = open_store(run).list()
    if run.output.json:
        run.answer(
            {
                "path": str(run.services.home().store),
                "bytes": sum(entry.exclusive_bytes for entry in entries),
                "entries": [entry_json(entry) for entry in entries],
            }
        )
        return
    if not entries:
        run.reporter.note(f"nothing is kept in {run.services.home().store}")
        return
    from tsdoc.cli.tables import Column

    rows = [
        (
            entry.entry_id[:ID_SHOWN],
            f"{entry.num_tokens:,}",
            amount(entry.num_bytes, "bytes"),
            status(entry),
            f"{duration(max(0.0, time.time() - entry.last_used))} ago",
            entry.name,
        )
        for entry in entries
    ]
    columns = [
        Column(title="id"),
        Column(title="tokens", right=True),
        Column(title="size", right=True),
        Column(title="status"),
        Column(title="last used"),
        Column(title="document", shrinks=True),
    ]
    run.terminal.table(columns, rows)


def cache_show(run: Run, entry_id: EntryId) -> None:
    """Show everything that is known of one entry."""
    (entry,) = find_entries(open_store(run), [entry_id])
    if run.output.json:
        run.answer(entry_json(entry))
        return
    from tsdoc.cli.tables import Column

    values = {**entry_json(entry), **{f"model.{k}": v for k, v in entry.model.items()}}
    values = {key: value for key, value in values.items() if key not in ("model", "meta")}
    rows = [(key, str(value)) for key, value in values.items()]
    run.terminal.table([Column(title="key"), Column(title="value", shrinks=True)], rows)


def cache_remove(run: Run, entry_ids: Ids = None, everything: All = False) -> None:
    """Remove entries, and the text that was read for them."""
    store = open_store(run)
    if everything == bool(entry_ids):
        raise UsageError(
            "give the ids of entries, or --all", hint="`tsdoc cache list` shows the ids."
        )
    entries = store.list() if everything else find_entries(store, entry_ids or [])
    freed = 0
    if entries and (not everything or confirm_all(run, entries)):
        freed = store.remove([entry.entry_id for entry in entries])
        run.services.remove_records(run.services.home())
    else:
        entries = []
    if run.output.json:
        run.answer({"removed": [entry.entry_id for entry in entries], "freed_bytes": freed})
    else:
        run.terminal.line(f"removed {len(entries)} entries, {amount(freed, 'bytes')}")


def cache_prune(run: Run, max_bytes: MaxBytes = None, *, tuning: Tuning) -> None:
    """Remove what was used longest ago until the rest fits the budget."""
    settings = run.settings(tuning).settings
    store = open_store(run, max_bytes=settings.store.max_bytes)
    gone = store.prune(max_bytes)
    freed = sum(entry.exclusive_bytes for entry in gone)
    if run.output.json:
        run.answer({"removed": [entry_json(entry) for entry in gone], "freed_bytes": freed})
    else:
        run.terminal.line(f"removed {len(gone)} entries, {amount(freed, 'bytes')}")


def cache_verify(run: Run, entry_ids: Ids = None) -> None:
    """Read every page that is kept and check it; exit code 5 when one is damaged.

    A damaged page is never used: its block is computed again when it is next needed.
    """
    store = open_store(run)
    entries = find_entries(store, entry_ids) if entry_ids else store.list()
    results = [verify_entry(run, store, entry) for entry in entries]
    if run.output.json:
        run.answer({"entries": results})
    else:
        for entry, result in zip(entries, results, strict=True):
            state = "damaged" if result["damaged"] or result["problem"] else "ok"
            run.terminal.line(f"{entry.entry_id[:ID_SHOWN]}  {state}  {entry.name}")
    if any(result["damaged"] or result["problem"] for result in results):
        raise typer.Exit(StoreError.exit_code)


def verify_entry(run: Run, store: Store, entry: EntryInfo) -> dict[str, object]:
    """Checks one entry; names every damaged block."""
    damaged: list[dict[str, object]] = []
    problem = entry.problem if entry.status not in ("complete", "incomplete") else ""
    if entry.status == "complete":
        run.reporter.start(f"verify {entry.name}", None, "pages")
        try:
            with store.load(entry.entry_id) as opened:
                errors = store.verify(opened, lambda done, _: run.reporter.advance(done))
            damaged = [{"where": e.where, "start": e.start, "end": e.end} for e in errors]
        except StoreError as error:
            problem = str(error)
        finally:
            run.reporter.finish()
    for block in damaged:
        message = f"tokens {block['start']}-{block['end']} are damaged"
        run.reporter.warn("damaged_block", str(block["where"]), message)
    if problem:
        run.reporter.warn("damaged_entry", entry.entry_id[:ID_SHOWN], problem)
    return {
        "entry_id": entry.entry_id,
        "status": entry.status,
        "damaged": damaged,
        "problem": problem or None,
    }


def open_store(run: Run, *, max_bytes: int | None = None) -> Store:
    """Opens the store of TSDOC_HOME; its warnings go to the reporter."""
    return run.services.open_store(run.services.home(), max_bytes=max_bytes, reporter=run.reporter)


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


def confirm_all(run: Run, entries: Sequence[EntryInfo]) -> bool:
    """Asks before everything is removed."""
    size = amount(sum(entry.exclusive_bytes for entry in entries), "bytes")
    return run.reporter.confirm(f"Remove all {len(entries)} entries ({size} or more)?")


def status(entry: EntryInfo) -> str:
    """Returns the status in words, with how far an incomplete entry is."""
    if entry.status == "incomplete" and entry.num_tokens:
        return f"incomplete, {100 * entry.committed_tokens // entry.num_tokens} %"
    return f"{entry.status}{', in use' if entry.in_use else ''}"


def entry_json(entry: EntryInfo) -> dict[str, object]:
    """Returns one entry as JSON."""
    return asdict(entry)
