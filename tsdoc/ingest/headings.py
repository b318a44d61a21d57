"""Cuts a text at its headings, every character into exactly one section."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tsdoc.ingest.extract import Part

MAX_DEPTH = 4
"""Headings below this depth stay inside the section of the heading above them."""

_MARGIN = 200
_NUMBERING = re.compile(r"(?:[^\w]|\d|(?i:\b(?:chapter|section|part|appendix)\b)|\b[A-Z]\b)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A heading that begins at character `start`; `depth` counts from 1."""

    start: int
    depth: int
    title: str


def split_at(text: str, headings: Sequence[Heading]) -> tuple[Part, ...]:
    """Cuts `text` at ascending headings and gives each part the titles that lie above it.

    Text before the first heading is a section without titles. White space alone, and a heading
    that nothing but deeper headings follow, go into the section behind them; white space at the
    end belongs to the last section.
    """
    titles: list[tuple[int, str]] = []
    parts: list[Part] = []
    start, line = 0, 1
    ends = [*(heading.start for heading in headings), len(text)]
    for at, end in enumerate(ends):
        deeper = 0 < at < len(headings) and headings[at].depth > headings[at - 1].depth
        bare = deeper and _is_only(text[start:end], headings[at - 1].title)
        if text[start:end].strip() and not bare:
            last = end if text[end:].strip() else len(text)
            names = tuple(title for _, title in titles)
            parts.append(Part(titles=names, text=text[start:last], first_line=line))
            line += text.count("\n", start, last)
            start = last
        if at < len(headings):
            heading = headings[at]
            titles = [entry for entry in titles if entry[0] < heading.depth]
            titles.append((heading.depth, heading.title))
    return tuple(parts)


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    r"""Yields (start, line without its `\n`)."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield start, text[start:end]
        start = end + 1


def _is_only(text: str, title: str) -> bool:
    """Whether a stretch of text holds nothing but one line, or its heading and number."""
    if len(text) > len(title) + _MARGIN:
        return False
    if len(text.strip().split("\n")) == 1:
        return True
    words, name = " ".join(text.split()), " ".join(title.split())
    at = words.casefold().find(name.casefold())
    return at >= 0 and _NUMBERING.fullmatch(words[:at] + words[at + len(name) :]) is not None
