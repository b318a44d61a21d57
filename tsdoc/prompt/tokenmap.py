"""Which token of a prompt came from which character of the document."""

from __future__ import annotations

import io
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tsdoc.ingest.document import Document, Place
from tsdoc.prompt.files import write_private


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Characters [start, end) of the text of section number `section`."""

    section: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MapArrays:
    """The token map as arrays; each field is one `.npy` file.

    Attributes:
        section_tokens: Prompt position where each section begins, and where the last one ends,
            int64 [num_sections + 1]. Before it is the template's head, after it the contents.
        char_start: Offset in its rendered section of each token's first character, ascending
            within a section, int32 [tokens of all sections].
        content: Where the section's own text begins and ends in the rendered section, int64
            [num_sections, 2].
        escapes: Offsets in the rendered section of the backslashes put in, int64 [num_escapes].
        escape_bounds: Which of them belong to each section, int64 [num_sections + 1].
    """

    section_tokens: npt.NDArray[np.int64]
    char_start: npt.NDArray[np.int32]
    content: npt.NDArray[np.int64]
    escapes: npt.NDArray[np.int64]
    escape_bounds: npt.NDArray[np.int64]

    def files(self) -> dict[str, bytes]:
        """Returns the content of one `.npy` file per array, by file name."""
        return {f"{name}.npy": array_bytes(getattr(self, name)) for name in _array_names()}

    def save(self, directory: Path) -> None:
        """Writes `files` into `directory`, readable by the user alone.

        Raises:
            OSError: they cannot be written.
        """
        for name, data in self.files().items():
            write_private(directory / name, data)

    @classmethod
    def load(cls, directory: Path) -> MapArrays:
        """Opens arrays written by `save`, memory-mapped and read-only.

        Raises:
            OSError: a file is missing.
            ValueError: a file is no array.
        """
        return cls(**{name: open_array(directory / f"{name}.npy") for name in _array_names()})


def _array_names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(MapArrays))


def array_bytes(array: npt.NDArray[Any]) -> bytes:
    """Returns the content of a `.npy` file that holds `array`."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def open_array(path: Path) -> npt.NDArray[Any]:
    """Opens a `.npy` file, memory-mapped and read-only; an empty array is read."""
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        read_header = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read_header(file)
    if 0 in shape:
        return np.zeros(shape, dtype)  # nothing can be mapped
    array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


class TokenMap:
    """Places and original text of a prompt's tokens.

    Tokens of a section's delimiter lines belong to the nearest character of its text. The head
    of the template and the contents belong to no place.
    """

    def __init__(self, document: Document, arrays: MapArrays) -> None:
        self.document = document
        self.arrays = arrays
        self._starts: dict[int, _Starts] = {}

    def section_of(self, token: int) -> int | None:
        """Returns the number of the section that the token at prompt position `token` is in."""
        bounds = self.arrays.section_tokens
        if not bounds[0] <= token < bounds[-1]:
            return None
        return int(np.searchsorted(bounds, token, side="right")) - 1

    def section_range(self, section: int) -> tuple[int, int]:
        """Returns the prompt positions [start, end) of a section, delimiters included."""
        start, end = self.arrays.section_tokens[section : section + 2]
        return int(start), int(end)

    def place(self, token: int) -> Place | None:
        """Returns where the token's first character came from, None for head and contents."""
        section = self.section_of(token)
        if section is None:
            return None
        rendered = self.arrays.char_start[token - int(self.arrays.section_tokens[0])]
        length = len(self.document.sections[section].text)
        return self.locate(section, min(self._original(section, int(rendered)), max(length - 1, 0)))

    def locate(self, section: int, offset: int) -> Place:
        """Like `Document.locate`, without counting the lines of the text every time."""
        part = self.document.sections[section]
        starts = self._starts.get(section)
        if starts is None:
            starts = self._starts[section] = _find_starts(self.document, section)
        page = label = line = cell = None
        if part.pages:
            at = part.pages[int(np.searchsorted(starts.pages, offset, side="right")) - 1]
            page, label = at.number, at.label
        if part.cells:
            cell = part.cells[int(np.searchsorted(starts.cells, offset, side="right")) - 1].number
        if part.lines:
            line = part.lines[int(np.searchsorted(starts.lines, offset, side="right")) - 1].number
        elif part.first_line is not None:
            line = part.first_line + int(np.searchsorted(starts.newlines, offset, side="left"))
        return Place(
            file=self.document.files[part.file].name,
            titles=part.titles,
            page=page,
            page_label=label,
            line=line,
            cell=cell,
        )

    def spans(self, token_start: int, token_end: int) -> list[Span]:
        """Returns the characters that tokens [token_start, token_end) spell, section by section.

        A character that tokens share is included if any of them is. Delimiters, head and contents
        have none.
        """
        bounds = self.arrays.section_tokens
        start = max(token_start, int(bounds[0]))
        end = min(token_end, int(bounds[-1]))
        found = []
        while start < end:
            section = int(np.searchsorted(bounds, start, side="right")) - 1
            stop = min(end, int(bounds[section + 1]))
            span = self._span(section, start, stop)
            if span.start < span.end:
                found.append(span)
            start = stop
        return found

    def text(self, token_start: int, token_end: int) -> str:
        """Returns the original text that tokens [token_start, token_end) spell."""
        return "".join(
            self.document.sections[span.section].text[span.start : span.end]
            for span in self.spans(token_start, token_end)
        )

    def tokens(self, span: Span) -> tuple[int, int]:
        """Returns the fewest prompt positions [start, end) whose tokens spell all of `span`."""
        first, stop = self.section_range(span.section)
        origin = int(self.arrays.section_tokens[0])
        chars = self.arrays.char_start[first - origin : stop - origin]
        begin = chars[np.searchsorted(chars, self._rendered(span.section, span.start), "right") - 1]
        start = int(np.searchsorted(chars, begin, "left"))  # tokens may share their character
        end = int(np.searchsorted(chars, self._rendered(span.section, span.end - 1), "right"))
        return first + start, first + max(end, start + 1)

    def _span(self, section: int, start: int, stop: int) -> Span:
        first = int(self.arrays.section_tokens[0])
        chars = self.arrays.char_start[start - first : self.section_range(section)[1] - first]
        last = chars[stop - start - 1]
        after = int(np.searchsorted(chars, last, side="right"))
        content_end = int(self.arrays.content[section, 1])
        end = int(chars[after]) if after < chars.size else content_end
        return Span(
            section=section,
            start=self._original(section, int(chars[0])),
            end=self._original(section, end),
        )

    def _rendered(self, section: int, offset: int) -> int:
        """Offset in the rendered section of character `offset` of the section's text."""
        content_start = int(self.arrays.content[section, 0])
        low, high = self.arrays.escape_bounds[section : section + 2]
        escapes = self.arrays.escapes[low:high]
        before = escapes - content_start - np.arange(escapes.size)  # their places in the text
        return content_start + offset + int(np.searchsorted(before, offset, side="right"))

    def _original(self, section: int, rendered: int) -> int:
        """Offset in the section's text of offset `rendered` in the rendered section."""
        content_start, content_end = (int(bound) for bound in self.arrays.content[section])
        low, high = self.arrays.escape_bounds[section : section + 2]
        rendered = min(max(rendered, content_start), content_end)
        added = np.searchsorted(self.arrays.escapes[low:high], rendered, side="left")
        return rendered - content_start - int(added)


@dataclass(frozen=True, slots=True)
class _Starts:
    """Offsets of a section's line ends, and of its document pages, file lines and cells."""

    newlines: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int64]
    lines: npt.NDArray[np.int64]
    cells: npt.NDArray[np.int64]


def _find_starts(document: Document, section: int) -> _Starts:
    part = document.sections[section]
    letters = np.frombuffer(part.text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    return _Starts(
        np.flatnonzero(letters == ord("\n")),
        *(
            np.array([mark.start for mark in marks], dtype=np.int64)
            for marks in (part.pages, part.lines, part.cells)
        ),
    )
