"""Sections of a Markdown text, from its headings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tsdoc.ingest.extract import Part
from tsdoc.ingest.headings import MAX_DEPTH, Heading, lines_of, split_at

_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*")
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})(.*)")
_NOT_PARAGRAPH = re.compile(r"(?: {4}|\t| {0,3}(?:[-*+>|]|\d{1,9}[.)])(?:[ \t]|$)| {0,3}>)")


def split_markdown(text: str) -> tuple[Part, ...]:
    """Splits Markdown at its headings (`#` and underlined), outside of code fences."""
    return split_at(text, list(markdown_headings(text)))


def markdown_headings(text: str) -> Iterator[Heading]:
    """Yields the headings of a Markdown text down to `MAX_DEPTH`."""
    fence: str | None = None
    paragraph: list[tuple[int, str]] = []
    for start, line in lines_of(_hide_front_matter(text)):
        found = _FENCE.fullmatch(line)
        if fence is not None:
            if found and found[1][0] == fence[0] and len(found[1]) >= len(fence):
                fence = None if not found[2].strip() else fence
            continue
        if found is not None:
            fence, paragraph = found[1], []
            continue
        heading = _atx(start, line)
        under = _SETEXT.fullmatch(line)
        if heading is None and under is not None and len(paragraph) == 1:
            depth = 1 if under[1][0] == "=" else 2
            heading = Heading(start=paragraph[0][0], depth=depth, title=paragraph[0][1])
        if heading is not None and heading.depth <= MAX_DEPTH:
            yield heading
        plain = line.strip() and heading is None and not _NOT_PARAGRAPH.match(line)
        paragraph = [*paragraph, (start, line.strip())] if plain else []


def _atx(start: int, line: str) -> Heading | None:
    found = _ATX.fullmatch(line)
    if found is None or not (found[2] or "").strip("# \t"):
        return None
    return Heading(start=start, depth=len(found[1]), title=found[2].strip())


def _hide_front_matter(text: str) -> str:
    """Replaces a YAML block at the top by spaces, so that its `---` underlines nothing."""
    found = re.match(r"---[ \t]*\n.*?\n---[ \t]*(?=\n|\Z)", text, re.DOTALL)
    return text if found is None else re.sub(r"[^\n]", " ", found[0]) + text[found.end() :]
