"""The lines of a chat: questions over one line or several, and commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tsdoc.cli.arguments import is_comment
from tsdoc.cli.console import Terminal

PROMPT = "> "
MORE = ". "
FENCE = '"""'
COMMANDS = ("evidence", "tokens", "quit", "help")
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What somebody typed: a question, or the name of a command and what stands behind it."""

    question: str | None = None
    command: str | None = None
    rest: str = ""


class Questions:
    r"""Reads questions from standard input.

    On a terminal a line that ends in a backslash goes on in the next, and lines between two lines
    of three double quotes are one question. Elsewhere each line is a question or, as in a file of
    questions, a comment. A line that is a slash and one word is a command, and so is one that
    begins with a command there is; empty lines are passed over.
    """

    def __init__(self, terminal: Terminal, asked: Sequence[str]) -> None:
        self._terminal = terminal
        if terminal.interactive and terminal.animated:
            _enable_editing(asked)

    def next(self) -> Line | None:
        """Returns the next question or command; None at the end of input."""
        while True:
            text = self._terminal.read_line(PROMPT)
            if text is None:
                return None
            command = _parse_command(text)
            if command is not None:
                return command
            if self._terminal.interactive:
                text = self._read_rest(text)
            elif is_comment(text):
                continue
            if text.strip():
                return Line(question=text.strip())

    def _read_rest(self, text: str) -> str:
        if text.strip() == FENCE:
            lines = iter(lambda: self._terminal.read_line(MORE), None)
            block = []
            for line in lines:
                if line.strip() == FENCE:
                    break
                block.append(line)
            return "\n".join(block)
        while text.endswith("\\"):
            more = self._terminal.read_line(MORE)
            text = f"{text[:-1]}\n{more or ''}"
        return text


def _parse_command(text: str) -> Line | None:
    """Returns the command that a line is; None for "/etc/fstab: why?" and "/etc is what?"."""
    match = _COMMAND.fullmatch(text)
    if match is None:
        return None
    name, rest = match[1].lower(), match[2] or ""
    return Line(command=name, rest=rest) if name in COMMANDS or not rest else None


def _enable_editing(asked: Sequence[str]) -> None:
    """Lets the terminal edit lines and go back to earlier questions, where Python can do that."""
    try:
        import readline
    except ImportError:  # as on Windows, whose terminals do it themselves
        return
    readline.set_auto_history(True)
    for question in asked:
        readline.add_history(question.replace("\n", " "))
