"""`tsdoc chat`: questions that follow one another about the same document."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from tsdoc.cli import completion
from tsdoc.cli.answering import open_sources, session_json
from tsdoc.cli.arguments import STDIN, require_sources
from tsdoc.cli.chat_loop import ChatLoop, say_resumed
from tsdoc.cli.command import command
from tsdoc.cli.options import Engines, Model, Reading, Sampling, Tuning
from tsdoc.cli.reporter import duration
from tsdoc.cli.run import Run
from tsdoc.errors import UsageError

PANEL = "Questions"

Sources = Annotated[
    list[str] | None,
    typer.Argument(metavar="SOURCE...", help="Files or directories.", show_default=False),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        autocompletion=completion.conversations,
        help="Keep the conversation under this name, or go on with the one that is kept.",
    ),
]
ShowList = Annotated[bool, typer.Option("--list", help="List the kept conversations and end.")]
Forget = Annotated[
    str | None,
    typer.Option(
        "--forget",
        metavar="NAME",
        autocompletion=completion.conversations,
        help="Remove a kept conversation and end.",
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Registers chat."""
    command(
        app,
        panel=PANEL,
        usage="SOURCE... [OPTIONS]",
        examples=[
            ("Talk about a book", "tsdoc chat book.pdf"),
            ("Go on with it tomorrow", "tsdoc chat book.pdf --name heirs"),
            ("From a script, one question a line", "tsdoc chat book.pdf < questions.txt"),
        ],
    )(chat)


def chat(
    run: Run,
    sources: Sources = None,
    name: Name = None,
    show_list: ShowList = False,
    forget: Forget = None,
    *,
    reading: Reading,
    tuning: Tuning,
    model: Model,
    engine: Engines,
    sampling: Sampling,
) -> None:
    """Ask questions that follow one another, each in sight of those before.

    On a terminal, type questions; /help lists what else can be typed. From a pipe, each line is a
    question, a command like /tokens, or, if it begins with # and a space, a comment; the answers
    come on stdout with a blank line between them.
    """
    if show_list or forget is not None:
        _manage(run, forget)
        return
    require_sources(sources or [], command="chat")
    settings = run.settings(tuning, model=model, engine=engine, sampling=sampling).settings
    _refuse_contradictions(run, sources or [], name=name, keeps=settings.store.enabled)
    with (
        open_sources(
            run, settings=settings, sources=sources or [], reading=reading, offline=model.offline
        ) as session,
        run.services.open_conversation(session, name=name) as conversation,
    ):
        num_before = len(conversation.turns)
        if num_before:
            say_resumed(run, conversation)
        session.prepare()
        answers = ChatLoop(run, conversation).talk()
        if run.output.json:
            run.answer(
                {
                    **session_json(session, answers),
                    "conversation": {
                        "name": name,
                        "turns_before": num_before,
                        "tokens": conversation.num_tokens,
                    },
                }
            )


def _refuse_contradictions(run: Run, sources: list[str], *, name: str | None, keeps: bool) -> None:
    if STDIN in sources:
        raise UsageError(
            "a chat reads its questions from standard input, so it cannot be a source",
            hint="Save it to a file first.",
        )
    if name is not None:
        run.services.check_conversation(run.services.home(), name)
        if not keeps:
            raise UsageError("--name keeps the conversation, and --no-store keeps nothing")
    if run.output.json and run.terminal.stdin.isatty():
        raise UsageError(
            "--json needs its questions from a pipe or a file",
            hint="For example: tsdoc chat book.pdf --json < questions.txt",
        )


def _manage(run: Run, forget: str | None) -> None:
    """Lists the kept conversations, or removes one."""
    home = run.services.home()
    if forget is not None:
        run.services.forget_conversation(home, forget)
        if not run.output.json:
            run.terminal.line(f"removed the conversation {forget}")
            return
    kept = run.services.list_conversations(home)
    if run.output.json:
        run.answer(
            {
                "removed": forget,
                "conversations": [
                    {
                        "name": name,
                        "document": talk.document if talk else None,
                        "model": talk.model if talk else None,
                        "turns": len(talk.turns) if talk else None,
                        "saved_at": talk.saved_at if talk else None,
                    }
                    for name, talk in kept.items()
                ],
            }
        )
        return
    if not kept:
        run.reporter.note("no conversation is kept; --name keeps one")
        return
    from tsdoc.cli.tables import Column

    rows = [
        (
            name,
            f"{len(talk.turns)}" if talk else "",
            f"{duration(max(0.0, time.time() - talk.saved_at))} ago" if talk else "damaged",
            talk.document if talk else "",
        )
        for name, talk in kept.items()
    ]
    columns = [
        Column(title="conversation"),
        Column(title="questions", right=True),
        Column(title="last used"),
        Column(title="document", shrinks=True),
    ]
    run.terminal.table(columns, rows)
