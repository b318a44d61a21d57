"""What a haystack is made of: noise, repeated filler, or a document of the user's."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from tsdoc.errors import UsageError
from tsdoc.eval.words import FILLER, make_sentence
from tsdoc.ingest.document import Document

Kind = Literal["noise", "filler", "document"]
KINDS: tuple[Kind, ...] = ("noise", "filler", "document")
PIECE_CHARS = 600
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def make_background(kind: Kind, rng: random.Random, document: Sequence[str]) -> Iterator[str]:
    """Returns pieces of a background, without end except for a document's.

    Args:
        kind: Which.
        rng: Draws the noise, and where in the document the pieces begin.
        document: What `split_document` returned.

    Raises:
        UsageError: a document is asked for and there is none.
    """
    if kind == "filler":
        return itertools.cycle(FILLER)
    if kind == "noise":
        return (make_sentence(rng) for _ in itertools.count())
    if not document:
        raise UsageError("a haystack of a document needs --source")
    start = rng.randrange(len(document))
    # From the middle on to the end, then from the beginning: every length up to the whole fits.
    return itertools.chain(document[start:], document[:start])


def split_document(document: Document) -> list[str]:
    """Splits the text of a document into paragraphs, long ones at ends of sentences."""
    pieces = []
    for section in document.sections:
        for paragraph in section.text.split("\n\n"):
            if paragraph.strip():
                pieces += _cut(f"{paragraph.rstrip()}\n\n")
    return pieces


def _cut(paragraph: str) -> list[str]:
    if len(paragraph) <= PIECE_CHARS:
        return [paragraph]
    parts, begin = [], 0
    for match in _SENTENCE_END.finditer(paragraph):
        if match.end() - begin >= PIECE_CHARS // 2:
            parts.append(paragraph[begin : match.end()])
            begin = match.end()
    return [part for part in [*parts, paragraph[begin:]] if part]
