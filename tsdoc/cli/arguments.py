"""What the arguments of a command mean: sources, questions, page ranges, passwords."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tsdoc.errors import UsageError
from tsdoc.ingest.options import LAST_PAGE
from tsdoc.terminal import parse_bytes

PASSWORD_VARIABLE = "TSDOC_PASSWORD"  # noqa: S105 - the name of a variable, not a secret
MAX_QUESTIONS_BYTES = 1_000_000
STDIN = "-"
_COMMENT = re.compile(r"\s*#+(\s|$)")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Sources, and the questions asked of them."""

    sources: tuple[str, ...]
    questions: tuple[str, ...]


def parse_request(
    positionals: Sequence[str], *, questions: Sequence[str], questions_file: str | None
) -> Request:
    """Tells sources from the question.

    With `questions` or `questions_file` every positional is a source; otherwise the last is the
    question.

    Raises:
        UsageError: the question or the source is missing or empty; the hint is the command as it
            should be.
            The same for a questions file that cannot be read or holds none.
    """
    if questions or questions_file is not None:
        require_sources(positionals, command="ask")
        if questions_file == STDIN and STDIN in positionals:
            raise UsageError("standard input cannot be both a SOURCE and the questions")
        asked = [*questions, *(read_questions(questions_file) if questions_file else [])]
        sources = list(positionals)
    else:
        _refuse_missing_question(positionals)
        *sources, last = positionals
        asked = [last]
        _refuse_second_question(sources)
        _refuse_loose_words(sources, last)
    for question in asked:
        if not question.strip():
            raise UsageError("the question is empty", hint=_corrected(sources))
    return Request(sources=tuple(sources), questions=tuple(asked))


def _refuse_second_question(sources: Sequence[str]) -> None:
    """Refuses a question where a source belongs.

    Raises:
        UsageError: one ends as a question does, and is no file.
    """
    for source in sources:
        if source.rstrip().endswith("?") and not os.path.lexists(source):
            raise UsageError(
                "only the last argument is a question",
                where=source,
                hint="Give each of several questions with -q.",
            )


def _refuse_loose_words(sources: Sequence[str], last: str) -> None:
    """Refuses a question without quotes, whose words would be taken for sources.

    Raises:
        UsageError: behind the first source stand words alone, and none of them is a file.
    """
    first, *words = sources
    loose = [*words, last]
    known = first == STDIN or os.path.lexists(first)
    if words and known and not any(re.search(r"[\s/.]", w) or os.path.lexists(w) for w in loose):
        question = " ".join(loose)
        raise UsageError(
            "a question of several words needs quotes",
            where=question,
            hint=f'For example: tsdoc ask {shlex.quote(first)} "{question}"',
        )


def require_sources(sources: Sequence[str], *, command: str) -> None:
    """Refuses a command line without a source.

    Raises:
        UsageError: there is none.
    """
    if not sources:
        raise UsageError("SOURCE missing", hint=f"For example: tsdoc {command} book.pdf")


def read_questions(name: str) -> list[str]:
    """Reads one question per line; blank lines and comments are left out. `-` is standard input.

    Raises:
        UsageError: it cannot be read as UTF-8, or holds no question.
    """
    try:
        with _open_questions(name) as file:
            text = file.read(MAX_QUESTIONS_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"the questions cannot be read ({error.strerror})", where=name) from error
    except UnicodeDecodeError as error:
        raise UsageError("the questions must be UTF-8 text", where=name) from error
    if len(text) > MAX_QUESTIONS_BYTES:
        raise UsageError(f"holds more than {MAX_QUESTIONS_BYTES} characters", where=name)
    lines = [line.strip() for line in text.splitlines()]
    questions = [line for line in lines if line and not is_comment(line)]
    if not questions:
        raise UsageError("holds no question", where=name, hint="Write one question per line.")
    return questions


def _open_questions(name: str) -> BinaryIO:
    if name != STDIN:
        return Path(name).open("rb")
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        raise UsageError(
            "no questions come from standard input",
            where="--questions -",
            hint="Pipe them in, or ask on a terminal with `tsdoc chat`.",
        )
    return sys.stdin.buffer


def is_comment(line: str) -> bool:
    """Whether a line among questions is a comment: `#` and a space, as no question begins.

    "#include <stdio.h>: why?" is a question.
    """
    return _COMMENT.match(line) is not None


def parse_pages(text: str) -> tuple[tuple[int, int], ...]:
    """Parses "100-180" or "1,5-9,20-" into (first, last) pairs, 1-based and inclusive.

    An open end ("20-") reaches to the last page.

    Raises:
        UsageError: not such a list, or a range that runs backwards.
    """
    return tuple(_parse_range(part.strip(), text) for part in text.split(","))


def parse_size(text: str, *, option: str) -> int:
    """Parses a size as it is shown, "10 GB", or in bytes, "10000000000".

    Raises:
        UsageError: it is none.
    """
    size = parse_bytes(text)
    if size is None:
        raise UsageError(
            f"{text!r} is no size", where=option, hint="Write bytes, or for example 500MB or 10GB."
        )
    return size


def find_password(
    *, file: str | None, option: str | None, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Returns the password for encrypted documents: from a file, the option, or TSDOC_PASSWORD.

    Raises:
        UsageError: both file and option are given, or the file cannot be read.
    """
    if file is None:
        return option if option is not None else environment.get(PASSWORD_VARIABLE)
    if option is not None:
        raise UsageError("--password and --password-file exclude each other")
    try:
        lines = Path(file).read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise UsageError(f"the password cannot be read ({error.strerror})", where=file) from error
    except UnicodeDecodeError as error:
        raise UsageError("the password must be UTF-8 text", where=file) from error
    return lines[0] if lines else ""


def _refuse_missing_question(positionals: Sequence[str]) -> None:
    if not positionals:
        raise UsageError("SOURCE and question missing", hint=_corrected(["book.pdf"]))
    last = positionals[-1]
    is_source = last == STDIN or _URL.match(last) is not None or os.path.lexists(last)
    if is_source:
        raise UsageError(
            f"question missing: {last!r}, the last argument, is a source",
            hint=_corrected(positionals),
        )
    if len(positionals) == 1:
        if " " in last.strip() or last.endswith("?"):
            example = f"tsdoc ask book.pdf {shlex.quote(last)}"
            raise UsageError(
                "question missing, or its SOURCE: ask needs both", hint=f"For example: {example}"
            )
        raise UsageError("question missing", hint=_corrected(positionals))


def _corrected(sources: Sequence[str]) -> str:
    return f'For example: tsdoc ask {shlex.join(sources)} "your question"'


def _parse_range(part: str, whole: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})(\s*-\s*(\d{1,9})?)?", part, re.ASCII)
    if match is None:
        raise UsageError(
            f"{part!r} is no page or range",
            where=f"--pages {whole}",
            hint="Write 7, 100-180 or 1,5-9,20-.",
        )
    first = int(match[1])
    last = first if match[2] is None else int(match[3]) if match[3] else LAST_PAGE
    if not 1 <= first <= last:
        raise UsageError(
            f"{part!r} runs backwards or begins before page 1", where=f"--pages {whole}"
        )
    return first, last
