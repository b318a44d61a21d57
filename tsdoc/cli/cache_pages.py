"""`tsdoc cache verify` and `repair`: whether what is kept is as it was, and what to do if not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from tsdoc.cli.entries import ID_SHOWN, is_foreign, note_foreign, show_states
from tsdoc.cli.kept import Ids, named_entries, open_store
from tsdoc.cli.options import Model, Tuning
from tsdoc.cli.run import Run
from tsdoc.errors import StoreError

if TYPE_CHECKING:
    from tsdoc.session.repairing import Repaired
    from tsdoc.store.listing import EntryInfo
    from tsdoc.store.store import Store

REPAIR = "`tsdoc cache repair` or the next question computes what is damaged again"
LOST = "ask about its sources again, or `tsdoc cache remove` it"


def cache_verify(run: Run, entry_ids: Ids = None) -> None:
    """Read every page that is kept and check it; exit code 5 when one is damaged.

    A damaged page is never used: its block is computed again when it is next needed.
    """
    store = open_store(run)
    entries = named_entries(store, entry_ids)
    results = [verify_entry(run, store, entry) for entry in entries]
    if run.output.json:
        run.answer({"entries": results})
    else:
        show_states(
            run,
            [
                (entry, _verdict(entry, result), "")
                for entry, result in zip(entries, results, strict=True)
            ],
        )
    note_foreign(run, entries)
    if any(
        result["damaged"] or result["problem"]
        for entry, result in zip(entries, results, strict=True)
        if not is_foreign(entry)
    ):
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
    if problem and not is_foreign(entry):
        message = f"{problem}; {_advice(store, entry)}"
        run.reporter.warn("damaged_entry", entry.entry_id[:ID_SHOWN], message)
    return {
        "entry_id": entry.entry_id,
        "status": entry.status,
        "damaged": damaged,
        "problem": problem or None,
    }


def _advice(store: Store, entry: EntryInfo) -> str:
    """What helps an entry of which more than pages is damaged."""
    if store.token_ids(entry.entry_id) is None:
        return f"its token ids are lost: {LOST}"
    if not entry.model:
        return f"what it was computed with is lost: {LOST}"
    return REPAIR


def cache_repair(run: Run, entry_ids: Ids = None, *, model: Model, tuning: Tuning) -> None:
    """Read every page that is kept and compute what is damaged again; exit code 5 if not all is.

    It needs the model that computed an entry, on this disk, and no source.
    """
    settings = run.settings(tuning, model=model).settings
    store = open_store(run, max_bytes=settings.store.max_bytes)
    entries = named_entries(store, entry_ids)
    home = run.services.home()
    repairer = run.services.repairer(
        settings=settings, home=home, store=store, reporter=run.reporter
    )
    results = [(entry, repairer.repair(entry)) for entry in entries]
    failed = [(e, r) for e, r in results if r.problem is not None and not is_foreign(e)]
    for entry, result in failed:
        run.reporter.warn("not_repaired", entry.entry_id[:ID_SHOWN], str(result.problem))
    if run.output.json:
        fields = [{"entry_id": e.entry_id, "status": e.status, **asdict(r)} for e, r in results]
        run.answer({"entries": fields})
    else:
        show_states(run, [(entry, *_outcome(entry, result)) for entry, result in results])
    note_foreign(run, entries)
    if failed:
        raise typer.Exit(StoreError.exit_code)


def _verdict(entry: EntryInfo, result: Mapping[str, object]) -> str:
    """Returns a word for what was found; pages are read of complete entries alone."""
    if is_foreign(entry):
        return "not checked"
    if result["damaged"] or result["problem"]:
        return "damaged"
    return {"complete": "ok", "incomplete": "not finished"}.get(entry.status, "not checked")


def _outcome(entry: EntryInfo, result: Repaired) -> tuple[str, str]:
    """Returns a word for what became of an entry, and what was computed for that."""
    if is_foreign(entry):
        return "not checked", ""
    if result.problem is not None:
        return "not repaired", ""
    if result.num_tokens:
        return "repaired", f"{result.num_tokens:,} tokens"
    return "not finished" if entry.status == "incomplete" else "ok", ""
