"""`tsdoc ask` and `tsdoc ingest`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tsdoc.cli.answering import answer_all, open_sources, prompt_json, session_json
from tsdoc.cli.arguments import parse_request, require_sources
from tsdoc.cli.command import command
from tsdoc.cli.evidence import wanted_passages
from tsdoc.cli.evidence_page import answers_page
from tsdoc.cli.options import Engines, Explaining, Model, Reading, Sampling, Sources, Tuning
from tsdoc.cli.reporter import amount, duration
from tsdoc.cli.run import Run
from tsdoc.report import check_target

PANEL = "Questions"

Items = Annotated[
    list[str] | None,
    typer.Argument(
        metavar='SOURCE... "QUESTION"',
        help="Files, directories or - for standard input, and the question last.",
        show_default=False,
    ),
]
Questions = Annotated[
    list[str] | None,
    typer.Option(
        "--question",
        "-q",
        metavar="TEXT",
        help="A question; then every argument is a SOURCE. May be repeated.",
        show_default=False,
    ),
]
QuestionsFile = Annotated[
    str | None,
    typer.Option(
        "--questions",
        metavar="FILE",
        help="A file with one question per line, or - for standard input; # and a space begin a "
        "comment.",
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Registers ask and ingest."""
    command(
        app,
        panel=PANEL,
        usage='SOURCE... "QUESTION" [OPTIONS]',
        examples=[
            ("A question about a book", 'tsdoc ask book.pdf "Who inherits the house?"'),
            ("About a part of it", 'tsdoc ask book.pdf --pages 100-180 "What is decided?"'),
            ("Several questions", 'tsdoc ask src/ -q "What is it for?" -q "How is it tested?"'),
            ("With a page to check it on", 'tsdoc ask a.pdf b.pdf --html why.html "Who pays?"'),
            ("From a pipe, for a script", "man bash | tsdoc ask - 'What is a job?' --json"),
        ],
    )(ask)
    command(
        app,
        panel=PANEL,
        usage="SOURCE... [OPTIONS]",
        examples=[
            ("Read a book now, ask later", "tsdoc ingest book.pdf"),
            ("A repository without its tests", "tsdoc ingest . --exclude 'tests/'"),
        ],
    )(ingest)


def ask(
    run: Run,
    items: Items = None,
    questions: Questions = None,
    questions_file: QuestionsFile = None,
    *,
    reading: Reading,
    tuning: Tuning,
    model: Model,
    engine: Engines,
    sampling: Sampling,
    explaining: Explaining,
) -> None:
    """Ask a question of books, PDFs or a repository.

    The sources are read and prefilled once; further questions reuse what is kept and take seconds.
    The answer goes to stdout, everything else to stderr. On a terminal, passages that the model
    looked at follow, with their pages or lines. Ctrl-C keeps what was prefilled.
    """
    request = parse_request(items or [], questions=questions or [], questions_file=questions_file)
    resolved = run.settings(
        tuning, model=model, engine=engine, sampling=sampling, explaining=explaining
    )
    settings, page = resolved.settings, explaining.html
    wanted = wanted_passages(run, resolved, html=page)
    if page is not None:
        check_target(Path(page))
    with open_sources(
        run, settings=settings, sources=request.sources, reading=reading, offline=model.offline
    ) as session:
        answers = answer_all(run, session, request.questions, wanted=wanted)
        if page is not None:
            run.write_page(Path(page), answers_page(session, answers))
        if run.output.json:
            run.answer(session_json(session, answers))


def ingest(
    run: Run,
    sources: Sources = None,
    *,
    reading: Reading,
    tuning: Tuning,
    model: Model,
    engine: Engines,
) -> None:
    """Read and prefill sources now, so that questions later take seconds."""
    require_sources(sources or [], command="ingest")
    settings = run.settings(tuning, model=model, engine=engine).settings
    with open_sources(
        run, settings=settings, sources=sources or [], reading=reading, offline=model.offline
    ) as session:
        prepared = session.prepare(must_keep=settings.store.enabled)
        kv_bytes = prepared.estimate.kv_bytes
        if run.output.json:
            run.answer({**prompt_json(session, prepared), "kv_bytes": kv_bytes})
            return
        kept = f"kept as {prepared.entry_id}" if prepared.kept else "not kept"
        cost = ""
        if prepared.computed_tokens:
            size, seconds = amount(kv_bytes, "bytes"), sum(prepared.times_s.values())
            cost = f" ({size} of K and V, {duration(seconds)})"
        run.terminal.stream(
            f"{session.document.name}: {prepared.prompt_tokens:,} tokens, "
            f"{prepared.reused_tokens:,} of them reused, {kept}{cost}"
        )
        run.terminal.line()
