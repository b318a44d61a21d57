"""`tsdoc tokens` and `tsdoc text`: what a prompt would be, without running a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tsdoc.cli.answering import document_json
from tsdoc.cli.arguments import require_sources
from tsdoc.cli.command import command
from tsdoc.cli.options import Model, Reading, Sources, Tuning
from tsdoc.cli.reporter import amount
from tsdoc.cli.run import Run
from tsdoc.terminal import format_count

if TYPE_CHECKING:
    from tsdoc.cli.counting import Counts
    from tsdoc.ingest.document import Document

PANEL = "Sources"
CHILDREN_SHOWN = 20
LONG_TREE = 100  # lines; what does not fit is shown down to parts of that share:
OPEN_FROM = 0.05
SKIPPED_SHOWN = 20
RENAMED_SHOWN = 20
EMPTY_SHOWN = 3

ShowAll = Annotated[
    bool,
    typer.Option("--all", help="Show every part, not only the biggest."),
]


def add_commands(app: typer.Typer) -> None:
    """Registers tokens and text."""
    command(
        app,
        panel=PANEL,
        usage="SOURCE... [OPTIONS]",
        examples=[
            ("Which parts of a repository are big?", "tsdoc tokens ."),
            ("Every chapter of a book", "tsdoc tokens book.pdf --all"),
        ],
    )(tokens)
    command(
        app,
        panel=PANEL,
        usage="SOURCE... [OPTIONS]",
        examples=[
            ("What does the model get to read?", "tsdoc text book.pdf | less"),
            ("Two pages of it", "tsdoc text book.pdf --pages 17-18"),
        ],
    )(text)


def tokens(
    run: Run,
    sources: Sources = None,
    show_all: ShowAll = False,
    *,
    reading: Reading,
    tuning: Tuning,
    model: Model,
) -> None:
    """Count the tokens of sources: files and sections as a tree, biggest first.

    Needs the model's tokenizer, not its weights; without one the counts are estimates, marked ≈.
    """
    from tsdoc.cli.counting import count_document, counts_json

    require_sources(sources or [], command="tokens")
    settings = run.settings(tuning, model=model).settings
    document = read_document(run, sources or [], reading)
    count = run.services.token_counter(
        settings=settings, home=run.services.home(), offline=model.offline, reporter=run.reporter
    )
    counts = count_document(document, count, tree_tokens=settings.prompt.tree_tokens)
    if run.output.json:
        run.answer({**counts_json(document, counts), "skipped": document_json(document)["skipped"]})
        return
    show_counts(run, document, counts, everything=show_all)
    say_renamed(run, document)
    say_skipped(run, document)


def text(run: Run, sources: Sources = None, *, reading: Reading, tuning: Tuning) -> None:
    """Print the text exactly as it would enter the prompt; needs no model."""
    from tsdoc.prompt.layout import prompt_text

    require_sources(sources or [], command="text")
    settings = run.settings(tuning).settings
    document = read_document(run, sources or [], reading)
    parts = prompt_text(document, tree_tokens=settings.prompt.tree_tokens)
    if run.output.json:
        run.answer({"document": document_json(document), "text": "".join(parts)})
        return
    for part in parts:
        run.terminal.write(part)
    run.terminal.flush()
    say_skipped(run, document)


def read_document(run: Run, sources: Sequence[str], reading: Reading) -> Document:
    """Reads sources and says what was wrong with parts of them."""
    document = run.services.read_sources(sources, run.ingest_options(reading), run.reporter)
    run.reporter.finish()
    for warning in document.warnings:
        run.reporter.warn(warning.code, warning.where, warning.message)
    return document


def show_counts(run: Run, document: Document, counts: Counts, *, everything: bool) -> None:
    """Prints the tree of counts as a table, and below a tree that is cut how long the whole is."""
    from tsdoc.cli.counting import build_tree, tree_lines
    from tsdoc.cli.tables import Column

    about = "≈" if counts.estimated else ""
    tree = build_tree(document, counts)
    whole = shown = list(tree_lines(tree, max_children=None))
    if not everything:
        shown = list(tree_lines(tree, max_children=CHILDREN_SHOWN))
        if len(shown) > LONG_TREE:
            shown = list(tree_lines(tree, max_children=CHILDREN_SHOWN, open_from=OPEN_FROM))
    rows = [
        (f"{about}{tokens:,}", f"{100 * tokens / max(1, counts.total):.1f} %", label)
        for tokens, label in shown
    ]
    columns = [
        Column(title="tokens", right=True),
        Column(title="share", right=True),
        Column(title=document.name, shrinks=True),
    ]
    run.terminal.table(columns, rows)
    if len(shown) < len(whole):
        files = format_count(len(document.files), "file")
        run.reporter.note(
            f"{about}{counts.total:,} tokens in {files}; these are the biggest parts, "
            "--all shows every one"
        )


def say_renamed(run: Run, document: Document) -> None:
    """Says which files and folders have another name than on the disk: "b (2) is /home/me/c/b"."""
    from tsdoc.ingest.gather import shown_name

    renamed: dict[str, Path] = {}
    for file in document.files:
        if file.path is None:
            continue
        name, path = file.name.split("/"), file.path
        while name and name[-1] == shown_name(path.name):
            name, path = name[:-1], path.parent
        if name:
            renamed["/".join(name)] = path
    for shown, path in list(renamed.items())[:RENAMED_SHOWN]:
        run.reporter.note(f"{shown} is {path}")
    if len(renamed) > RENAMED_SHOWN:
        more = len(renamed) - RENAMED_SHOWN
        run.reporter.note(f"{more:,} more have other names; --json has all paths")


def say_skipped(run: Run, document: Document) -> None:
    """Names the files that were left out, the first ones one by one.

    Those that the user's own patterns leave out are only counted, and so are many empty ones;
    unreadable ones and those without the section asked for have their warning already.
    """
    from tsdoc.ingest.gather import EMPTY, EXCLUDED, UNREADABLE
    from tsdoc.ingest.narrow import NO_SECTION

    excluded = sum(file.reason == EXCLUDED for file in document.skipped)
    empty = sum(file.reason == EMPTY for file in document.skipped)
    said = (EXCLUDED, NO_SECTION, UNREADABLE, *((EMPTY,) if empty > EMPTY_SHOWN else ()))
    own = [file for file in document.skipped if file.reason not in said]
    for file in own[:SKIPPED_SHOWN]:
        size = amount(file.num_bytes, "bytes")
        run.reporter.note(f"left out: {file.name} ({file.reason}, {size})")
    if len(own) > SKIPPED_SHOWN:
        counted = Counter(file.reason for file in own[SKIPPED_SHOWN:]).most_common()
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counted)
        more = len(own) - SKIPPED_SHOWN
        run.reporter.note(f"left out: {more:,} more ({reasons}); --json names them all")
    if empty > EMPTY_SHOWN:
        run.reporter.note(f"left out: {empty:,} empty files; --json names them all")
    if excluded:
        run.reporter.note(f"left out: {excluded:,} by --include and --exclude")
