"""Plain text and Markdown: sections from headings, every character in exactly one section."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tsdoc.ingest.extract import Part

MAX_DEPTH = 4
"""Headings below this depth stay inside the section of the heading above them."""

_NUMBERING_LEN = 12

_CHAPTER = re.compile(
    r"[ \t]*(?P<word>volume|book|part|act|chapter|letter|stave|canto|scene)[ \t]+"
    r"(?:[0-9]{1,3}|[ivxlcdm]{1,9}|the[ \t]+[a-z]+(?:-[a-z]+)?|one|two|three|four|five|six|seven|"
    r"eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|nineteen|"
    r"twenty(?:-[a-z]+)?|thirty(?:-[a-z]+)?)(?P<rest>[ \t]*[.:—–-].{0,80}|[ \t]*)",
    re.IGNORECASE,
)
_DIVISIONS = frozenset({"volume", "book", "part", "act"})
_ALONE = re.compile(r"(prologue|epilogue|preface|introduction|foreword|afterword)\.?", re.I)
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*")
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})(.*)")
_NOT_PARAGRAPH = re.compile(r"(?: {4}|\t| {0,3}(?:[-*+>|]|\d{1,9}[.)])(?:[ \t]|$)| {0,3}>)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """A heading that begins at character `start`; `depth` counts from 1."""

    start: int
    depth: int
    title: str


def split_text(text: str) -> tuple[Part, ...]:
    """Splits a plain text at its chapter headings; without any it is one section.

    A chapter heading is a line of its own such as `CHAPTER IV`, `Chapter 12. Of Storms`,
    `BOOK TWO` or `Epilogue`, after and before a blank line, and there must be at least two that
    are numbered. A list of contents is not cut up: a heading opens a section only if prose
    follows it.
    """
    headings = list(_chapters(text))
    if sum(_ALONE.fullmatch(heading.title) is None for heading in headings) < 2:
        headings = []
    return split_at(text, _without_contents(text, headings))


def split_markdown(text: str) -> tuple[Part, ...]:
    """Splits Markdown at its headings (`#` and underlined), outside of code fences."""
    return split_at(text, list(_markdown_headings(text)))


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


def _is_only(text: str, title: str) -> bool:
    """Whether a stretch of text holds its heading and at most a little numbering."""
    return len(text.strip()) <= len(title) + _NUMBERING_LEN


def _lines(text: str) -> Iterator[tuple[int, str]]:
    r"""Yields (start, line without its `\n`)."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        yield start, text[start:end]
        start = end + 1


def _chapters(text: str) -> Iterator[Heading]:
    before_blank = True
    pending: Heading | None = None
    for start, line in _lines(text):
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


def _without_contents(text: str, headings: list[Heading]) -> list[Heading]:
    """Drops headings that nothing but a few words follows, unless a deeper one follows."""
    kept = []
    for at, heading in enumerate(headings):
        following = headings[at + 1] if at + 1 < len(headings) else None
        end = len(text) if following is None else following.start
        body = text[heading.start : end].strip()[len(heading.title) :]
        opens = following is not None and following.depth > heading.depth
        if len(body.split()) >= 20 or (opens and _opens_kept(text, headings, at + 1)):
            kept.append(heading)
    return kept


def _opens_kept(text: str, headings: list[Heading], at: int) -> bool:
    end = headings[at + 1].start if at + 1 < len(headings) else len(text)
    return len(text[headings[at].start : end].split()) >= 20


def _markdown_headings(text: str) -> Iterator[Heading]:
    fence: str | None = None
    paragraph: list[tuple[int, str]] = []
    for start, line in _lines(_hide_front_matter(text)):
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
