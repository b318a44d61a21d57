"""What a reader returns for one file, before files are put together as a `Document`."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from tsdoc.ingest.document import Mark, PageStart

_Start = TypeVar("_Start", Mark, PageStart)

LOSSES = frozenset(
    {
        "decoded_lossily",
        "page_failed",
        "page_undecodable",
        "page_without_text",
        "part_failed",
        "private_characters",
        "unreadable",
    }
)
"""Warning codes that mean that something of the input is missing: `--strict` stops on these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A section of one file; see `Section`, which it becomes."""

    titles: tuple[str, ...]
    text: str
    first_line: int | None = None
    pages: tuple[PageStart, ...] = ()
    lines: tuple[Mark, ...] = ()
    cells: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Trouble with a part of a file: a code as in `IngestWarning`, and where within the file."""

    code: str
    message: str
    place: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extract:
    """The text of one file, every character once, in reading order."""

    parts: tuple[Part, ...]
    problems: tuple[Problem, ...] = ()


def say_problems(problems: Sequence[Problem]) -> str:
    """Returns what was wrong, and where within the file, in one line."""
    return "; ".join(" ".join(filter(None, (p.place, p.message))) for p in problems)


def starts_within(starts: Sequence[_Start], low: int, high: int) -> tuple[_Start, ...]:
    """Returns the starts that concern characters [low, high), relative to `low`; the first at 0.

    Args:
        starts: Of the whole text, ascending.
        low: Where the stretch begins.
        high: Where it ends.
    """
    first = max(0, bisect.bisect_right(starts, low, key=lambda mark: mark.start) - 1)
    last = bisect.bisect_left(starts, high, key=lambda mark: mark.start)
    return tuple(replace(mark, start=max(0, mark.start - low)) for mark in starts[first:last])
