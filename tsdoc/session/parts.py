"""The parts of a document that are summarised one by one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from tsdoc.ingest.document import Document, Place
from tsdoc.prompt.assemble import Prompt

By = Literal["section", "file"]
MIN_TOKENS = 256  # a shorter section is joined with its neighbours


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive sections of one file.

    Attributes:
        title: The headings that its sections share, or those of the first and of the last one; the
            file's name where there are none.
        headings: Of each section that holds text.
        sections: Section numbers [first, last).
        tokens: Prompt positions [start, end).
        first: Where it begins.
        last: Where its last character stands.
    """

    title: str
    headings: tuple[tuple[str, ...], ...]
    sections: tuple[int, int]
    tokens: tuple[int, int]
    first: Place
    last: Place

    @property
    def where(self) -> str:
        """Its pages, cells or lines: "book.pdf p. 3-9", "a.ipynb cell 2-5", "book.txt:28-184"."""
        first, last = self.first, self.last
        if first.page is not None:
            return f"{first}" if first.page == last.page else f"{first.file} p. {_pages(self)}"
        if first.cell is not None:
            return f"{first}" if first.cell == last.cell else f"{first}-{last.cell}"
        if first.line is None or first.line == last.line:
            return f"{first}"
        return f"{first}-{last.line}"


def split_document(document: Document, prompt: Prompt, by: By) -> list[Part]:
    """Returns the parts in the order of the document; text without a heading is one as well.

    With "section", a section of fewer than MIN_TOKENS tokens joins the part before it, until those
    that have joined it are as long as that together.
    """
    groups: list[tuple[int, int]] = []
    short_tokens = 0  # of the short sections in the last group
    for number, section in enumerate(document.sections):
        if not section.text.strip():
            continue
        start, end = prompt.map.section_range(number)
        is_short = end - start < MIN_TOKENS
        joins = by == "file" or (is_short and short_tokens < MIN_TOKENS)
        if groups and joins and document.sections[groups[-1][0]].file == section.file:
            groups[-1] = (groups[-1][0], number + 1)
        else:
            groups.append((number, number + 1))
            short_tokens = 0
        short_tokens += end - start if is_short else 0
    return [_part(document, prompt, first, last, by) for first, last in groups]


def _part(document: Document, prompt: Prompt, first: int, last: int, by: By) -> Part:
    tail = document.sections[last - 1]
    name = document.files[tail.file].name
    sections = [section for section in document.sections[first:last] if section.text.strip()]
    headings = tuple(section.titles for section in sections)
    return Part(
        title=name if by == "file" else _title(document, first, last, name),
        headings=headings,
        sections=(first, last),
        tokens=(prompt.map.section_range(first)[0], prompt.map.section_range(last - 1)[1]),
        first=prompt.map.locate(first, 0),
        last=prompt.map.locate(last - 1, max(len(tail.text.rstrip()) - 1, 0)),
    )


def _title(document: Document, first: int, last: int, name: str) -> str:
    """What sections [first, last) of a file are called together: "Book › One – Three"."""
    head, tail = document.sections[first], document.sections[last - 1]
    begin, end = head.titles or (name,), tail.titles or (name,)
    depth = len(head.titles)
    after = document.sections[last : last + 1]
    goes_on = any(s.file == head.file and s.titles[:depth] == head.titles for s in after)
    if begin == end or (tail.titles[:depth] == head.titles and not goes_on):
        return " › ".join(begin)  # the first heading stands above all of it, and above no more
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(begin, end, strict=False))
    shared = min(len(list(equal)), len(end) - 1)
    return f"{' › '.join(begin)} – {' › '.join(end[shared:])}"


def _pages(part: Part) -> str:
    return f"{part.first.page}-{part.last.page}"
