"""The result of reading sources: files, sections of text, and where each character came from.

A `Document` is plain data. Offsets count characters (code points) of `Section.text`; ranges are
half-open; page and line numbers are 1-based.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file that was read.

    Attributes:
        name: Shown to the user and put into the prompt: the path relative to its SOURCE, with `/`
            between parts, unique within the document.
        path: Where it lies, or None for standard input.
        kind: The reader that read it: "text", "markdown", "pdf", …
        num_bytes: Size of the file.
        sha256: Hex digest of its bytes.
    """

    name: str
    path: Path | None
    kind: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStart:
    """A document page begins at `start` in its section's text.

    Attributes:
        start: Character offset into `Section.text`.
        number: Physical page, counted from 1.
        label: The printed page label where the file has one ("iv", "A-3").
    """

    start: int
    number: int
    label: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Line or cell `number` of the file begins at character `start` of its section's text."""

    start: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    r"""A stretch of one file's text that is tokenised by itself: a chapter, or a whole file.

    Attributes:
        file: Index into `Document.files`.
        titles: Headings from the outermost inwards; empty when the section is the whole file.
        text: The text as a reader of the file would see it, line ends as `\n`.
        first_line: Line of the file on which `text` begins; None where the format has no lines.
        pages: Starts of document pages within `text`, ascending; the first at offset 0. Empty
            where the format has no pages.
        lines: Where lines of the file begin within `text`, ascending; the first at offset 0. Empty
            where every line of `text` is one of the file, as it is in all formats but HTML.
        cells: Starts of a notebook's cells within `text`, ascending; the first at offset 0.
    """

    file: int
    titles: tuple[str, ...]
    text: str
    first_line: int | None
    pages: tuple[PageStart, ...] = ()
    lines: tuple[Mark, ...] = ()
    cells: tuple[Mark, ...] = ()

    def begins(self) -> str:
        """Returns where in its file the section begins: "p. 3", "cell 2", "line 120", or ""."""
        if self.pages:
            return f"p. {self.pages[0].number}"
        if self.cells:
            return f"cell {self.cells[0].number}"
        return "" if self.first_line is None else f"line {self.first_line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestWarning:
    """Trouble with a part of the input; the rest was read.

    Attributes:
        code: Stable word for scripts: "page_without_text", "decoded_lossily", …
        where: File name, with page or line where known.
        message: One sentence.
    """

    code: str
    where: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedFile:
    """A file that was seen and left out, and why ("binary", "too large", "excluded")."""

    name: str
    reason: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a character of the document came from; what does not apply is None."""

    file: str
    titles: tuple[str, ...]
    page: int | None
    page_label: str | None
    line: int | None
    cell: int | None = None

    def __str__(self) -> str:
        if self.page is not None:
            printed = f" (printed {self.page_label})" if self._label_differs() else ""
            return f"{self.file} p. {self.page}{printed}"
        if self.cell is not None:
            return f"{self.file} cell {self.cell}"
        return f"{self.file}:{self.line}" if self.line is not None else self.file

    def _label_differs(self) -> bool:
        return self.page_label is not None and self.page_label != str(self.page)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Everything that was read from the sources of one command, in prompt order."""

    name: str
    files: tuple[SourceFile, ...]
    sections: tuple[Section, ...]
    warnings: tuple[IngestWarning, ...] = ()
    skipped: tuple[SkippedFile, ...] = ()

    def locate(self, section: int, offset: int) -> Place:
        """Returns where character `offset` of section number `section` came from."""
        part = self.sections[section]
        page = label = line = cell = None
        if part.pages:
            at = bisect.bisect_right(part.pages, offset, key=_start) - 1
            page, label = part.pages[at].number, part.pages[at].label
        if part.cells:
            cell = part.cells[bisect.bisect_right(part.cells, offset, key=_start) - 1].number
        if part.lines:
            line = part.lines[bisect.bisect_right(part.lines, offset, key=_start) - 1].number
        elif part.first_line is not None:
            line = part.first_line + part.text.count("\n", 0, offset)
        return Place(
            file=self.files[part.file].name,
            titles=part.titles,
            page=page,
            page_label=label,
            line=line,
            cell=cell,
        )


def _start(mark: PageStart | Mark) -> int:
    return mark.start
