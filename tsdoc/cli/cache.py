"""`tsdoc cache`: what is kept on disk, and getting rid of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tsdoc.cli import completion
from tsdoc.cli.arguments import parse_size
from tsdoc.cli.cache_pages import cache_repair, cache_verify
from tsdoc.cli.command import add_group, command
from tsdoc.cli.entries import (
    ID_SHOWN,
    count,
    describe_total,
    entry_json,
    find_entries,
    show_entries,
    show_entry,
    title,
)
from tsdoc.cli.kept import NAMED, Ids, named_entries, open_store
from tsdoc.cli.options import Tuning
from tsdoc.cli.reporter import amount
from tsdoc.cli.run import Run
from tsdoc.errors import StoreError, UsageError
from tsdoc.terminal import format_count

if TYPE_CHECKING:
    from tsdoc.store.listing import EntryInfo
    from tsdoc.store.store import Store

EntryId = Annotated[
    str,
    typer.Argument(
        metavar="ENTRY",
        autocompletion=completion.entries,
        help=f"{NAMED} `tsdoc cache list` shows all.",
    ),
]
All = Annotated[bool, typer.Option("--all", help="All entries.")]
MaxBytes = Annotated[
    str | None,
    typer.Option(
        "--max-bytes",
        metavar="SIZE",
        help="Keep at most this, 500MB or 10GB for example; default: store.max_bytes.",
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Registers the group `cache`."""
    about = "What is kept on disk for later questions."
    group = add_group(app, "cache", help_text=about, panel="Setup")
    command(
        group,
        name="list",
        usage="[OPTIONS]",
        examples=[("What is kept, and how much it takes", "tsdoc cache list")],
    )(cache_list)
    command(
        group,
        name="show",
        usage="ENTRY [OPTIONS]",
        examples=[("All about one entry", "tsdoc cache show 3f9a21")],
    )(cache_show)
    command(
        group,
        name="remove",
        usage="ENTRY... [OPTIONS]",
        examples=[
            ("Remove what was kept of a book", "tsdoc cache remove book.pdf"),
            ("Remove everything", "tsdoc cache remove --all"),
        ],
    )(cache_remove)
    command(
        group,
        name="prune",
        usage="[OPTIONS]",
        examples=[("Keep the last used 10 GB", "tsdoc cache prune --max-bytes 10GB")],
    )(cache_prune)
    command(
        group,
        name="verify",
        usage="[ENTRY...] [OPTIONS]",
        examples=[("Read every page and check it", "tsdoc cache verify")],
    )(cache_verify)
    command(
        group,
        name="repair",
        usage="[ENTRY...] [OPTIONS]",
        examples=[("Compute again what is damaged", "tsdoc cache repair")],
    )(cache_repair)


def cache_list(run: Run) -> None:
    """List what is kept, last used first.

    Documents that begin alike share what they have in common. Removing an entry frees its own
    bytes; what is shared goes with the last entry that uses it. "To redo" is how long its own
    tokens would take to compute again, "?" where this machine was never measured with the model.

    "complete" says that all of it was computed and is there, "damaged" that a file is missing, has
    the wrong size or cannot be understood; `tsdoc cache show` says which. No page is read for the
    list: whether one is damaged, `tsdoc cache verify` tells.
    """
    store = open_store(run)
    entries = store.list()
    rates = run.services.prefill_rates(run.services.home())
    num_bytes, shared_bytes, budget = store.num_bytes(), store.shared_bytes(), store.budget()
    if run.output.json:
        run.answer(
            {
                "path": str(run.services.home().store),
                "bytes": num_bytes,
                "shared_bytes": shared_bytes,
                "budget_bytes": budget,
                "entries": [entry_json(entry, rates) for entry in entries],
            }
        )
        return
    if not entries:
        run.reporter.note(f"nothing is kept in {run.services.home().store}")
        return
    show_entries(run, entries, rates, sharing=shared_bytes > 0)
    total = describe_total(entries, num_bytes=num_bytes, shared_bytes=shared_bytes)
    run.reporter.note(f"{total}; the budget is {amount(budget, 'bytes')}")
    if shared_bytes:
        run.reporter.note(
            "removing an entry frees its own bytes; what is shared goes with the last that uses it"
        )


def cache_show(run: Run, entry_id: EntryId) -> None:
    """Show everything that is known of one entry."""
    entries = open_store(run).list()
    (entry,) = find_entries(entries, [entry_id])
    rates = run.services.prefill_rates(run.services.home())
    if run.output.json:
        run.answer(entry_json(entry, rates))
        return
    show_entry(run, entry, entries, rates)


def cache_remove(run: Run, entry_ids: Ids = None, everything: All = False) -> None:
    """Remove entries, and the text that was read for them; exit code 5 when one has to stay.

    Conversations and results of `tsdoc eval` are not entries: a line says what stays of them.
    """
    store = open_store(run)
    if everything == bool(entry_ids):
        message = "say what to remove: entries, or --all"
        raise UsageError(
            "--all removes every entry, so none can be named beside it" if everything else message,
            hint="`tsdoc cache list` shows the entries.",
        )
    entries = named_entries(store, entry_ids)
    if everything:
        note_what_stays(run)
    if everything and entries and not confirm_all(run, store, entries):
        entries = []
    gone, freed = [], 0
    for entry in entries:
        try:
            freed += store.remove([entry.entry_id])
        except StoreError as error:
            run.reporter.warn("not_removed", entry.entry_id[:ID_SHOWN], f"stays: {error.message}")
        else:
            gone.append(entry)
    if gone:
        remove_orphaned_records(run, store)
    if run.output.json:
        run.answer({"removed": [entry.entry_id for entry in gone], "freed_bytes": freed})
    else:
        run.terminal.line(f"removed {count(gone)}, {amount(freed, 'bytes')}")
    if len(gone) < len(entries):
        raise typer.Exit(StoreError.exit_code)


def cache_prune(run: Run, max_bytes: MaxBytes = None, *, tuning: Tuning) -> None:
    """Remove what was used longest ago until the rest fits the budget."""
    limit = None if max_bytes is None else parse_size(max_bytes, option="--max-bytes")
    settings = run.settings(tuning).settings
    store = open_store(run, max_bytes=settings.store.max_bytes)
    gone, freed = store.prune(limit)
    remove_orphaned_records(run, store)
    rates = run.services.prefill_rates(run.services.home())
    if run.output.json:
        run.answer({"removed": [entry_json(entry, rates) for entry in gone], "freed_bytes": freed})
        return
    for entry in gone:
        run.terminal.line(f"{entry.entry_id[:ID_SHOWN]}  {title(entry)}")
    run.terminal.line(f"removed {count(gone)}, {amount(freed, 'bytes')}")


def remove_orphaned_records(run: Run, store: Store) -> None:
    """Removes the text that was read for entries which are gone."""
    kept = {str(entry.meta.get("record")) for entry in store.list()}
    run.services.remove_records(run.services.home(), kept)


def note_what_stays(run: Run) -> None:
    """Says what holds text of documents besides entries, if anything does."""
    home = run.services.home()
    names = run.services.list_conversations(home)
    stays = []
    if names:
        kept = format_count(len(names), "conversation", "conversations")
        stays.append(f"{kept} (`tsdoc chat --list` shows, `tsdoc chat --forget NAME` removes)")
    if home.evals.is_dir() and any(home.evals.iterdir()):
        stays.append(f"results of `tsdoc eval` in {home.evals}")
    if stays:
        run.reporter.note(f"not removed with entries: {' and '.join(stays)}")


def confirm_all(run: Run, store: Store, entries: Sequence[EntryInfo]) -> bool:
    """Asks before everything is removed."""
    size = amount(store.num_bytes(), "bytes")
    question = f"Remove all entries ({count(entries)}, {size})?"
    return run.reporter.confirm(question, enter=False)
