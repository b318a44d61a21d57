"""Sections of a plain text, from lines that look like chapter headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from tsdoc.ingest.extract import Part
from tsdoc.ingest.headings import Heading, lines_of, split_at

_CHAPTER = re.compile(
    r"[ \t]*(?P<word>volume|book|part|act|chapter|letter|stave|canto|scene)[ \t]+"
    r"(?:[0-9]{1,3}|[ivxlcdm]{1,9}|the[ \t]+[a-z]+(?:-[a-z]+)?|one|two|three|four|five|six|seven|"
    r"eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen|"
    r"twenty(?:-[a-z]+)?|thirty(?:-[a-z]+)?)(?P<rest>[ \t]*[.:—–-].{0,80}|[ \t]*)",
    re.IGNORECASE,
)
_DIVISIONS = frozenset({"volume", "book", "part", "act"})
_ALONE = re.compile(r"(prologue|epilogue|preface|introduction|foreword|afterword)\.?", re.I)
_NUMERAL_LEN = 12
_SHORTEST_RUN = 3
_FEW_WORDS = 20
_ROMAN_VALUES = (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1)
_ROMAN_DIGITS = ("M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I")


def split_text(text: str) -> tuple[Part, ...]:
    """Splits a plain text at its chapter headings; without any it is one section.

    A chapter heading is a line of its own such as `CHAPTER IV`, `Chapter 12. Of Storms`,
    `BOOK TWO` or `Epilogue`, after and before a blank line; at least two must be numbered. Bare
    numerals count if they run from 1 (or I) without a gap to 3 at least. A list of contents is
    not cut up: a heading opens a section only if prose follows it.
    """
    headings = list(_chapters(text))
    if sum(_ALONE.fullmatch(heading.title) is None for heading in headings) < 2:
        headings = _numerals(text, headings)
    return split_at(text, _without_contents(text, headings))


def _chapters(text: str) -> Iterator[Heading]:
    before_blank = True
    pending: Heading | None = None
    for start, line in lines_of(text):
        blank = not line.strip()
        if pending is not None and blank:
            yield pending
        pending = None
        if not blank and before_blank:
            found = _CHAPTER.fullmatch(line)
            title = " ".join(line.split())
            if found is not None:
                depth = 1 if found["word"].lower() in _DIVISIONS else 2
                pending = Heading(start=start, depth=depth, title=title)
            elif _ALONE.fullmatch(title):
                pending = Heading(start=start, depth=1, title=title)
        before_blank = blank


def _numerals(text: str, others: list[Heading]) -> list[Heading]:
    """Returns chapters that are headed by numerals alone, with `others` between them, or none."""
    found: list[Heading] = []
    for heading in _lone_lines(text):
        if heading.title.rstrip(".") in (_roman(len(found) + 1), str(len(found) + 1)):
            found.append(heading)
    if len(found) < _SHORTEST_RUN:
        return []
    after = [other for other in others if other.start > found[0].start]
    return sorted([*found, *after], key=lambda heading: heading.start)


def _lone_lines(text: str) -> Iterator[Heading]:
    """Yields short lines with a blank line before and after them."""
    lines = [(0, ""), *lines_of(text), (len(text), "")]
    for (_, before), (start, line), (_, after) in zip(
        lines, islice(lines, 1, None), islice(lines, 2, None), strict=False
    ):
        title = line.strip()
        if title and len(title) <= _NUMERAL_LEN and not before.strip() and not after.strip():
            yield Heading(start=start, depth=1, title=title)


def _roman(number: int) -> str:
    out = ""
    for value, digits in zip(_ROMAN_VALUES, _ROMAN_DIGITS, strict=True):
        while number >= value:
            out, number = out + digits, number - value
    return out


def _without_contents(text: str, headings: list[Heading]) -> list[Heading]:
    """Drops headings that nothing but a few words follows, unless a deeper one follows."""
    kept = []
    for at, heading in enumerate(headings):
        following = headings[at + 1] if at + 1 < len(headings) else None
        end = len(text) if following is None else following.start
        body = text[heading.start : end].strip()[len(heading.title) :]
        opens = following is not None and following.depth > heading.depth
        if len(body.split()) >= _FEW_WORDS or (opens and _opens_kept(text, headings, at + 1)):
            kept.append(heading)
    return kept


def _opens_kept(text: str, headings: list[Heading], at: int) -> bool:
    end = headings[at + 1].start if at + 1 < len(headings) else len(text)
    return len(text[headings[at].start : end].split()) >= _FEW_WORDS
