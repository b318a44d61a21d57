"""The only module that prints: stdout carries the answer, stderr everything else.

Both streams replace what their encoding lacks, foreign text passes `visible`, and nothing is read
as Rich markup. A closed pipe raises `ClosedPipeError`, which the entry point turns into a silent
end; any other failure to write is a `ResourceError`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tsdoc.cli.wrapping import GrowingText, word_wrapped
from tsdoc.errors import ResourceError, TsdocError
from tsdoc.terminal import escaped_json, visible, visible_line

if TYPE_CHECKING:
    from rich.console import Console

    from tsdoc.cli.tables import Column

SHOW_CURSOR = "\x1b[?25h"


class ClosedPipeError(Exception):
    """Whoever read stdout or stderr has gone."""


class Terminal:
    """Standard output and standard error of one command.

    Args:
        stdin: Read for confirmations, and for the questions of a chat.
        stdout: Where the answer goes.
        stderr: Where everything else goes.
    """

    def __init__(self, *, stdin: TextIO, stdout: TextIO, stderr: TextIO) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self._answer = GrowingText()
        for stream in (stdin, stdout, stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")

    @property
    def answers_on_screen(self) -> bool:
        """Whether stdout is a terminal."""
        return self.stdout.isatty()

    @property
    def answers_beside_notes(self) -> bool:
        """Whether stderr goes where stdout does, as with 2>&1: lines would cut answers in two."""
        try:
            return os.path.sameopenfile(self.stdout.fileno(), self.stderr.fileno())
        except (OSError, ValueError):  # one is closed, or no file
            return False

    @property
    def interactive(self) -> bool:
        """Whether somebody can be asked: stdin and stderr are terminals."""
        return self.stdin.isatty() and self.stderr.isatty()

    @property
    def animated(self) -> bool:
        """Whether stderr is a terminal that can redraw a line."""
        return self.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")

    @property
    def columns(self) -> int | None:
        """How wide stdout is; None when it is no terminal."""
        return shutil.get_terminal_size().columns if self.answers_on_screen else None

    @property
    def note_columns(self) -> int | None:
        """How wide stderr is; None when it is no terminal."""
        return _width(self.stderr)

    def write(self, text: str) -> None:
        """Writes text: made visible on a terminal, exact elsewhere."""
        self._put(self.stdout, visible(text) if self.answers_on_screen else text)

    def stream(self, text: str) -> None:
        """Writes the next piece of an answer: on a terminal at once and cut between words."""
        width = _width(self.stdout)
        if width is None:
            self.write(text)
        else:
            self._put(self.stdout, self._answer.add(visible(text), width))
        if self.answers_on_screen:
            self.flush()

    def line(self, text: str = "") -> None:
        """Writes one line, made visible wherever it goes; ends the line of an answer."""
        self._put(self.stdout, f"{self._answer.end()}{visible(text)}\n")

    def json(self, value: Mapping[str, object]) -> None:
        """Writes one JSON object; escaped to ASCII where stdout is not UTF-8."""
        encoding = (getattr(self.stdout, "encoding", None) or "utf-8").lower().replace("-", "")
        text = json.dumps(value, ensure_ascii=encoding != "utf8", indent=2)
        self._put(self.stdout, escaped_json(text) + "\n")

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> None:
        """Writes a table: as wide as the terminal at most, as wide as it needs elsewhere."""
        from tsdoc.cli.tables import table_lines

        for line in table_lines(columns, rows, width=self.columns):
            self._put(self.stdout, f"{line}\n")

    def say(self, message: str) -> None:
        """Writes one line to stderr, where that is a terminal as several, cut between words.

        An answer on the same screen that is in the middle of a line goes on in the next.
        """
        if self._answer.begun and self.stderr.isatty():
            self.line()
            self.flush()
        lines = word_wrapped(visible_line(message), _width(self.stderr))
        self._put(self.stderr, "\n".join(lines) + "\n")

    def read_line(self, prompt: str) -> str | None:
        """Asks for a line, with editing and history where terminal and Python have them.

        The prompt goes to the screen, never into an answer that is piped.

        Returns:
            The line without its end; None at the end of input.
        """
        self.flush()
        on_screen = self.interactive and self.answers_on_screen and self.animated
        if on_screen and self.stdin is sys.stdin:
            try:
                return input(prompt)
            except EOFError:
                return None
        if self.interactive:
            self._put(self.stderr, prompt)
            self.stderr.flush()
        line = self.stdin.readline()
        return line.removesuffix("\n").removesuffix("\r") if line else None

    def prompt(self, question: str) -> str:
        """Writes a question to stderr and returns the line typed; empty at the end of input."""
        lines = word_wrapped(visible_line(question), _width(self.stderr))
        self._put(self.stderr, "\n".join(lines) + " ")
        self.stderr.flush()
        return self.stdin.readline()

    def error(self, error: BaseException, *, debug: bool) -> None:
        """Writes the one line of an error to stderr, after its traceback with `debug`."""
        if debug:
            self._put(self.stderr, "".join(traceback.format_exception(error)))
        self.say(f"tsdoc: {' '.join(describe(error).split())}")

    def rich(self, file: TextIO, *, terminal: bool) -> Console:
        """Returns a Rich console that reads no markup; Rich itself obeys NO_COLOR and TERM."""
        from rich.console import Console

        return Console(
            file=file, force_terminal=terminal, markup=False, highlight=False, emoji=False
        )

    def flush(self) -> None:
        """Flushes stdout.

        Raises:
            ClosedPipeError: the reader has gone.
            ResourceError: what was written cannot be stored (a full disk).
        """
        self._guard(self.stdout, self.stdout.flush)

    def restore(self) -> None:
        """Shows the cursor again before a hard exit."""
        if self.animated:
            os.write(self.stderr.fileno(), SHOW_CURSOR.encode("ascii"))

    def _put(self, stream: TextIO, text: str) -> None:
        self._guard(stream, lambda: stream.write(text))

    def _guard(self, stream: TextIO, write: Callable[[], object]) -> None:
        try:
            write()
        except BrokenPipeError as error:
            _silence(stream)
            raise ClosedPipeError from error
        except OSError as error:
            _silence(stream)
            name = "stdout" if stream is self.stdout else "stderr"
            raise ResourceError(
                f"the output cannot be written ({error.strerror})", where=name
            ) from error


def _width(stream: TextIO) -> int | None:
    """How wide a terminal is; None when `stream` is none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def _silence(stream: TextIO) -> None:
    """Points a broken stream at nothing, so that the interpreter's last flush is silent."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):  # not a real file
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)


class _ClosedStream(io.StringIO):
    """Standard output of a process that was started without one."""

    def write(self, text: str, /) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def standard_terminal() -> Terminal:
    """Returns the process's own streams; one that was closed at the start is None in Python.

    Then stdin is at its end, notes are lost, and an answer cannot be written. A replacement stays
    open for the life of the process.

    What whoever started tsdoc made non-blocking is made blocking again: Python drops what such a
    pipe has no room for, and takes one that is empty for its end, without a word.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is not None:
            # It is closed or no file, or Windows cannot do it.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.set_blocking(stream.fileno(), True)
    nowhere = Path(os.devnull)
    return Terminal(
        stdin=sys.stdin or nowhere.open(encoding="utf-8"),
        stdout=sys.stdout or _ClosedStream(),
        stderr=sys.stderr or nowhere.open("w", encoding="utf-8"),
    )


def describe(error: BaseException) -> str:
    """Returns an error's text for the user: where, what, and what to do next."""
    if isinstance(error, TsdocError):
        return str(error)
    name = type(error).__name__
    return f"internal error ({name}: {error}). Run it again with --debug for the traceback."
