"""The store, and the entries that a command of `tsdoc cache` is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tsdoc.cli import completion
from tsdoc.cli.entries import find_entries
from tsdoc.cli.run import Run

if TYPE_CHECKING:
    from tsdoc.store.listing import EntryInfo
    from tsdoc.store.store import Store

NAMED = "An id, how it begins, or a document's name where only one entry has it."

Ids = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ENTRY...",
        autocompletion=completion.entries,
        help=f"{NAMED} `tsdoc cache list` shows all.",
        show_default=False,
    ),
]


def named_entries(store: Store, names: Sequence[str] | None) -> list[EntryInfo]:
    """Returns the entries that are named, or all."""
    entries = store.list()
    return find_entries(entries, names) if names else entries


def open_store(run: Run, *, max_bytes: int | None = None) -> Store:
    """Opens the store of TSDOC_HOME; its warnings go to the reporter."""
    return run.services.open_store(run.services.home(), max_bytes=max_bytes, reporter=run.reporter)
