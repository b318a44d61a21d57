"""The loop of a chat: questions and commands as they are typed, or one a line from a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tsdoc.cli.answering import look, name_answer, say_ended
from tsdoc.cli.evidence import show_evidence
from tsdoc.cli.questions import COMMANDS, FENCE, Line, Questions
from tsdoc.cli.run import Run
from tsdoc.errors import ResourceError, StoreError
from tsdoc.terminal import format_count

if TYPE_CHECKING:
    from tsdoc.session import Answer, Conversation

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


class ChatLoop:
    """Takes questions and answers them.

    Args:
        run: The command.
        conversation: What the questions go on with.
    """

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
                if line is None or line == Line(command="quit"):
                    break
                if line.command is not None:
                    self._obey(line.command, line.rest)
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

    def _obey(self, name: str, rest: str) -> None:
        say = self._run.terminal.say
        if name not in COMMANDS:
            say(f"there is no /{name}; /help lists what there is")
        elif rest:
            say(f"nothing can stand behind /{name}; a space before it makes the line a question")
        elif name == "help":
            for line in HELP.splitlines():
                say(line)
        elif name == "tokens":
            self._say_tokens()
        else:
            self._say_evidence()

    def _say_evidence(self) -> None:
        turns = self._conversation.turns
        if not turns:
            self._run.terminal.say("nothing has been answered yet")
        elif self._most_passages == 0:
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
    def _most_passages(self) -> int:
        """Passages to look for."""
        return self._conversation.session.settings.answer.evidence

    @property
    def _looks_unasked(self) -> bool:
        """Whether passages are looked for without a command; a pipe gets the answers alone."""
        return self._most_passages > 0 and (self._interactive or self._run.output.json)

    def _look(self) -> None:
        """Finds where the last answer comes from."""
        answer = self._answers[-1]
        self._answers[-1] = look(self._run, self._conversation, answer, count=self._most_passages)

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
            show_evidence(self._run, found, self._which(len(self._answers) - 1), listed=False)

    def _answer(self, question: str) -> None:
        try:
            self._answers.append(self._ask(question))
            # What is kept has to be found while it is known what the model looked at.
            if self._looks_unasked and (self._conversation.name or self._run.output.json):
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

        answer = conversation.ask(question, show, keep_queries=self._most_passages > 0)
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


def say_resumed(run: Run, conversation: Conversation) -> None:
    """Says what a kept conversation is about."""
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
