"""`tsdoc chat`: questions that follow one another about the same document."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from tsdoc.cli import completion
from tsdoc.cli.answering import look, name_answer, open_sources, say_ended, session_json
from tsdoc.cli.arguments import STDIN, require_sources
from tsdoc.cli.command import command
from tsdoc.cli.evidence import show_evidence
from tsdoc.cli.options import Engines, Model, Reading, Sampling, Sources, Tuning
from tsdoc.cli.questions import FENCE, Questions
from tsdoc.cli.reporter import duration
from tsdoc.cli.run import Run
from tsdoc.errors import ResourceError, StoreError, UsageError
from tsdoc.terminal import format_count

if TYPE_CHECKING:
    from tsdoc.session import Answer, Conversation

PANEL = "Questions"
SHOWN = 60  # characters of the last question that is said again
ENDINGS = {
    "length": " (its answer was cut)",
    "loop": " (its answer repeated itself)",
    "interrupted": " (its answer was stopped)",
}
HELP = f"""/evidence where the model looked for its last answer
/tokens   how long document and conversation are
/quit     end the chat (Ctrl-D does, too)
/help     this text
Ctrl-C stops an answer.
A line that ends in \\ goes on in the next one.
A question of many lines stands between two lines of {FENCE}"""

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
    question, unless it begins with # and a space, which makes it a comment; the answers come on
    stdout with a blank line between them.
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
            _say_resumed(run, conversation)
        session.prepare()
        answers = _Chat(run, conversation).talk()
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


class _Chat:
    """The loop of one chat."""

    def __init__(self, run: Run, conversation: Conversation) -> None:
        self._run = run
        self._conversation = conversation
        self._answers: list[Answer] = []
        self._interactive = run.terminal.interactive
        self._questions = Questions(run.terminal, [turn.question for turn in conversation.turns])

    def talk(self) -> list[Answer]:
        """Answers questions until there are no more, or somebody leaves."""
        if self._interactive:
            self._run.reporter.note("Ask away; /help lists what else can be typed, /quit ends.")
        stopped = False
        while True:
            line = None
            try:
                line = self._questions.next()
                stopped = False
                if line is None or line.command == "quit":
                    break
                if line.command is not None:
                    self._obey(line.command)
                elif line.question is not None:
                    self._answer(line.question)
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._run.reporter.finish()
                self._run.terminal.say("")
                if stopped:
                    raise
                stopped = True
                self._run.interrupts.forgive()
                asked = line is not None and line.question is not None
                what = "stopped before there was an answer" if asked else "nothing is asked"
                self._run.reporter.note(f"({what}; Ctrl-C again or /quit ends the chat)")
        if self._interactive and line is None:
            self._run.terminal.say("")
        return self._answers

    def _obey(self, name: str) -> None:
        say = self._run.terminal.say
        if name == "help":
            for line in HELP.splitlines():
                say(line)
        elif name == "tokens":
            self._say_tokens()
        elif name == "evidence":
            self._say_evidence()
        else:
            say(f"there is no /{name}; /help lists what there is")

    def _say_evidence(self) -> None:
        turns = self._conversation.turns
        if not turns:
            self._run.terminal.say("nothing has been answered yet")
        elif self._num_passages == 0:
            self._run.terminal.say("evidence is switched off; --set evidence=3 switches it on")
        else:
            if turns[-1].evidence is None and self._answers:
                self._look()
            asked = _shortened(turns[-1].question)
            if (found := turns[-1].evidence) is not None:
                self._run.terminal.say(f"about the answer to: {asked}")
                show_evidence(self._run, found)
                self._run.reporter.gap()
            else:
                self._run.terminal.say(
                    f"where the last answer comes from was not kept; ask again: {asked}"
                )

    @property
    def _num_passages(self) -> int:
        """Passages to look for; a pipe gets the answers alone."""
        wanted = self._interactive or self._run.output.json
        return self._conversation.session.settings.answer.evidence if wanted else 0

    def _look(self) -> None:
        """Finds where the last answer comes from."""
        answer = self._answers[-1]
        self._answers[-1] = look(self._run, self._conversation, answer, count=self._num_passages)

    def _say_tokens(self) -> None:
        session = self._conversation.session
        document, turns = len(session.prompt.ids), self._conversation.num_tokens
        left = session.settings.prompt.max_prompt_tokens - document - turns
        count = format_count(len(self._conversation.turns), "question")
        self._run.terminal.say(
            f"the document is {document:,} tokens long, the conversation {turns:,} "
            f"({count}); there is room for {max(left, 0):,} more"
        )

    def _look_at_once(self) -> None:
        try:
            self._look()
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            self._run.reporter.finish()
            self._run.interrupts.forgive()
            self._run.reporter.note("(stopped looking; /evidence looks again)")
        if self._run.output.json and (found := self._answers[-1].evidence) is not None:
            show_evidence(self._run, found, self._which(len(self._answers) - 1))

    def _answer(self, question: str) -> None:
        try:
            self._answers.append(self._ask(question))
            # What is kept has to be found while it is known what the model looked at.
            if self._num_passages and (self._conversation.name or self._run.output.json):
                self._look_at_once()
        except (ResourceError, StoreError) as error:
            if not self._interactive:
                raise
            self._run.reporter.finish()
            self._run.terminal.error(error, debug=self._run.output.debug)

    def _ask(self, question: str) -> Answer:
        run, conversation = self._run, self._conversation
        as_json = run.output.json
        on_screen = self._interactive and run.terminal.answers_on_screen  # below its question
        if self._answers and not as_json and not on_screen:
            run.terminal.line()
        if conversation.num_pending:
            run.reporter.start("reading the conversation again", None, "tokens")
        begun = False

        def show(text: str) -> None:
            nonlocal begun
            if not begun:
                run.reporter.finish()
                begun = True
            if not as_json:
                run.terminal.stream(text)

        answer = conversation.ask(question, show, keep_queries=self._num_passages > 0)
        if not as_json:
            run.terminal.line()
            run.terminal.flush()
        if answer.finish_reason == "interrupted":
            run.interrupts.forgive()
            if not self._interactive:
                raise KeyboardInterrupt
            run.reporter.note("(stopped; the answer stays as it is)")
        say_ended(run, answer, self._which(len(self._answers)))
        return answer

    def _which(self, number: int) -> str:
        """Names an answer of this run; on a terminal it stands right above."""
        return "" if self._interactive else name_answer(number)


def _refuse_contradictions(run: Run, sources: list[str], *, name: str | None, keeps: bool) -> None:
    if STDIN in sources:
        raise UsageError(
            "a chat reads its questions from standard input, so it cannot be a source",
            hint="Save it to a file first.",
        )
    if name is not None and not keeps:
        raise UsageError("--name keeps the conversation, and --no-store keeps nothing")
    if run.output.json and run.terminal.stdin.isatty():
        raise UsageError(
            "--json needs its questions from a pipe or a file",
            hint="For example: tsdoc chat book.pdf --json < questions.txt",
        )


def _say_resumed(run: Run, conversation: Conversation) -> None:
    last = conversation.turns[-1]
    ended = ENDINGS.get(last.finish_reason, "")
    asked = format_count(len(conversation.turns), "question")
    run.reporter.note(
        f"going on with {conversation.name}: {asked} so far, the last one: "
        f"{_shortened(last.question)}{ended}"
    )


def _shortened(question: str) -> str:
    shown = " ".join(question.split())
    return shown if len(shown) <= SHOWN else f"{shown[: SHOWN - 1]}…"


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
