"""`tsdoc cache`: what is kept on disk, and getting rid of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tsdoc.cli.command import command
from tsdoc.cli.entries import age, count, date, entry_json, find_entries, redo, status
from tsdoc.cli.options import Model, Tuning
from tsdoc.cli.reporter import amount
from tsdoc.cli.run import Run
from tsdoc.errors import StoreError, UsageError

if TYPE_CHECKING:
    from tsdoc.store.listing import EntryInfo
    from tsdoc.store.store import Store

ID_SHOWN = 10
REPAIR = "`tsdoc cache repair` or the next question computes it again"

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
    command(
        group,
        name="repair",
        usage="[ID...] [OPTIONS]",
        examples=[("Compute again what is damaged", "tsdoc cache repair")],
    )(cache_repair)


def cache_list(run: Run) -> None:
    """List what is kept, last used first.

    "To redo" is what it takes to compute an entry again once it was removed, as far as this machine
    was measured.
    """
    store = open_store(run)
    entries = store.list()
    rates = run.services.prefill_rates(run.services.home())
    num_bytes, budget = store.num_bytes(), store.budget()
    if run.output.json:
        run.answer(
            {
                "path": str(run.services.home().store),
                "bytes": num_bytes,
                "budget_bytes": budget,
                "entries": [entry_json(entry, rates) for entry in entries],
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
            age(entry.last_used),
            redo(entry, rates),
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
        Column(title="to redo", right=True),
        Column(title="document", shrinks=True),
    ]
    run.terminal.table(columns, rows)
    held, limit = amount(num_bytes, "bytes"), amount(budget, "bytes")
    run.reporter.note(f"{count(entries)}, {held}; the budget is {limit}")


def cache_show(run: Run, entry_id: EntryId) -> None:
    """Show everything that is known of one entry."""
    (entry,) = find_entries(open_store(run), [entry_id])
    rates = run.services.prefill_rates(run.services.home())
    if run.output.json:
        run.answer(entry_json(entry, rates))
        return
    from tsdoc.cli.tables import Column

    size, own = (amount(n, "bytes") for n in (entry.num_bytes, entry.exclusive_bytes))
    rows = [
        ("id", entry.entry_id),
        ("document", entry.name),
        ("status", status(entry) + (f": {entry.problem}" if entry.problem else "")),
        ("tokens", f"{entry.num_tokens:,}, of which {entry.committed_tokens:,} are computed"),
        ("size", f"{size}; removing it frees {own}"),
        ("to redo", redo(entry, rates)),
        ("created", f"{date(entry.created)}, {age(entry.created)}"),
        ("last used", f"{date(entry.last_used)}, {age(entry.last_used)}"),
        ("model", str(entry.meta.get("model", "unknown"))),
        *(("file", name) for name in entry.sources),
        ("model key", entry.model_key),
        *((f"  {key}", str(value)) for key, value in sorted(entry.model.items())),
    ]
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
        remove_orphaned_records(run, store)
    else:
        entries = []
    if run.output.json:
        run.answer({"removed": [entry.entry_id for entry in entries], "freed_bytes": freed})
    else:
        run.terminal.line(f"removed {count(entries)}, {amount(freed, 'bytes')}")


def cache_prune(run: Run, max_bytes: MaxBytes = None, *, tuning: Tuning) -> None:
    """Remove what was used longest ago until the rest fits the budget."""
    settings = run.settings(tuning).settings
    store = open_store(run, max_bytes=settings.store.max_bytes)
    gone = store.prune(max_bytes)
    remove_orphaned_records(run, store)
    freed = sum(entry.exclusive_bytes for entry in gone)
    rates = run.services.prefill_rates(run.services.home())
    if run.output.json:
        run.answer({"removed": [entry_json(entry, rates) for entry in gone], "freed_bytes": freed})
        return
    for entry in gone:
        run.terminal.line(f"{entry.entry_id[:ID_SHOWN]}  {entry.name}")
    run.terminal.line(f"removed {count(gone)}, {amount(freed, 'bytes')}")


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
            if entry.status == "incomplete":
                state = "not finished"
            run.terminal.line(f"{entry.entry_id[:ID_SHOWN]}  {state:<12}  {entry.name}")
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
        message = f"tokens {block['start']:,} to {block['end']:,} are damaged; {REPAIR}"
        run.reporter.warn("damaged_block", str(block["where"]), message)
    if problem:
        run.reporter.warn("damaged_entry", entry.entry_id[:ID_SHOWN], f"{problem}; {REPAIR}")
    return {
        "entry_id": entry.entry_id,
        "status": entry.status,
        "damaged": damaged,
        "problem": problem or None,
    }


def cache_repair(run: Run, entry_ids: Ids = None, *, model: Model, tuning: Tuning) -> None:
    """Read every page that is kept and compute what is damaged again; exit code 5 if not all is.

    It needs the model that computed an entry, on this disk, and no source.
    """
    settings = run.settings(tuning, model=model).settings
    store = open_store(run, max_bytes=settings.store.max_bytes)
    entries = find_entries(store, entry_ids) if entry_ids else store.list()
    home = run.services.home()
    repairer = run.services.repairer(
        settings=settings, home=home, store=store, reporter=run.reporter
    )
    results = [(entry, repairer.repair(entry)) for entry in entries]
    if run.output.json:
        fields = [{"entry_id": e.entry_id, "status": e.status, **asdict(r)} for e, r in results]
        run.answer({"entries": fields})
    else:
        for entry, result in results:
            state = "ok" if entry.status != "incomplete" else "not finished"
            if result.problem is not None:
                state = f"not repaired: {result.problem}"
            elif result.num_tokens:
                state = f"repaired, {result.num_tokens:,} tokens computed again"
            run.terminal.line(f"{entry.entry_id[:ID_SHOWN]}  {state:<12}  {entry.name}")
    if any(result.problem is not None for _, result in results):
        raise typer.Exit(StoreError.exit_code)


def open_store(run: Run, *, max_bytes: int | None = None) -> Store:
    """Opens the store of TSDOC_HOME; its warnings go to the reporter."""
    return run.services.open_store(run.services.home(), max_bytes=max_bytes, reporter=run.reporter)


def remove_orphaned_records(run: Run, store: Store) -> None:
    """Removes the text that was read for entries which are gone."""
    kept = {str(entry.meta.get("record")) for entry in store.list()}
    run.services.remove_records(run.services.home(), kept)


def confirm_all(run: Run, entries: Sequence[EntryInfo]) -> bool:
    """Asks before everything is removed."""
    size = amount(sum(entry.exclusive_bytes for entry in entries), "bytes")
    return run.reporter.confirm(f"Remove all {len(entries)} entries ({size} or more)?")
