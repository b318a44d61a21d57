"""The parts of a document that are summarised one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tsdoc.ingest.document import Document, Place
from tsdoc.prompt.assemble import Prompt

By = Literal["section", "file"]
MIN_TOKENS = 256  # a shorter section is no part of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive sections of one file.

    Attributes:
        title: Headings of the first section, or the file's name.
        sections: Section numbers [first, last).
        tokens: Prompt positions [start, end).
        first: Where it begins.
        last: Where its last character stands.
    """

    title: str
    sections: tuple[int, int]
    tokens: tuple[int, int]
    first: Place
    last: Place

    @property
    def where(self) -> str:
        """Its pages or lines: "book.pdf p. 3-9", "book.txt:28-184"."""
        first, last = self.first, self.last
        if first.page is not None:
            return f"{first}" if first.page == last.page else f"{first.file} p. {_pages(self)}"
        if first.line is None or first.line == last.line:
            return f"{first}"
        return f"{first}-{last.line}"


def split_document(document: Document, prompt: Prompt, by: By) -> list[Part]:
    """Returns the parts in the order of the document; text without a heading is one as well.

    With "section", a section of fewer than MIN_TOKENS tokens joins the one before it.
    """
    groups: list[tuple[int, int]] = []
    for number, section in enumerate(document.sections):
        if not section.text.strip():
            continue
        start, end = prompt.map.section_range(number)
        small = by == "file" or end - start < MIN_TOKENS
        if groups and small and document.sections[groups[-1][0]].file == section.file:
            groups[-1] = (groups[-1][0], number + 1)
        else:
            groups.append((number, number + 1))
    return [_part(document, prompt, first, last, by) for first, last in groups]


def _part(document: Document, prompt: Prompt, first: int, last: int, by: By) -> Part:
    head, tail = document.sections[first], document.sections[last - 1]
    name = document.files[head.file].name
    titled = by == "section" and head.titles
    return Part(
        title=" › ".join(head.titles) if titled else name,
        sections=(first, last),
        tokens=(prompt.map.section_range(first)[0], prompt.map.section_range(last - 1)[1]),
        first=prompt.map.locate(first, 0),
        last=prompt.map.locate(last - 1, max(len(tail.text.rstrip()) - 1, 0)),
    )


def _pages(part: Part) -> str:
    return f"{part.first.page}-{part.last.page}"
