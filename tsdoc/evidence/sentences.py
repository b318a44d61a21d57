"""Where the sentences of a text lie, for prose, lists and code alike."""

from __future__ import annotations

import re
from itertools import pairwise

# A sentence ends in . ! ? … with what closes behind it, before white space and a new beginning;
# not behind an initial or the commonest abbreviations of names.
_NAMES = "".join(rf"(?<!\b{word})" for word in ("Mr", "Mrs", "Ms", "Dr", "St", "Prof", "[A-Z]"))
_SENTENCE_END = re.compile(_NAMES + r"""[.!?…][)\]"'”’»]*(?=\s+[^\sa-z])|[。！？]["”」』）]*""")
_PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n\s*")
_MIN_CHARS = 24  # what is shorter belongs to the sentence behind it: "No.", "Mr."


def paragraph_around(text: str, offset: int, *, reach: int) -> tuple[int, int]:
    """Returns the characters [start, end) of the paragraph that holds `offset`.

    Paragraphs end at empty lines; a longer one is cut `reach` characters from `offset`.
    """
    low, high = max(offset - reach, 0), min(offset + reach, len(text))
    start, end = low, high
    for match in _PARAGRAPH_END.finditer(text, low, high):
        if match.end() <= offset:
            start = match.end()
        elif match.start() <= offset:  # `offset` is between two paragraphs: it ends the first
            end = match.start()
            break
        else:
            end = match.start()
            break
    return start, max(end, min(offset + 1, high))


def sentences(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Splits [start, end) of `text` into sentences without white space around them."""
    cuts = [start]
    for match in _SENTENCE_END.finditer(text, start, end):
        if match.end() - cuts[-1] >= _MIN_CHARS:
            cuts.append(match.end())
    cuts.append(end)
    return [part for a, b in pairwise(cuts) if (part := _stripped(text, a, b)) is not None]


def lines(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Splits [start, end) of `text` into its lines that are not empty."""
    cuts = [start, *(at + 1 for at in range(start, end) if text[at] == "\n"), end]
    return [part for a, b in pairwise(cuts) if (part := _stripped(text, a, b)) is not None]


def _stripped(text: str, start: int, end: int) -> tuple[int, int] | None:
    part = text[start:end]
    left = start + len(part) - len(part.lstrip())
    right = left + len(part.strip())
    return (left, right) if left < right else None
