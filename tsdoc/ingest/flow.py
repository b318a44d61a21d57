"""Builds running text out of marked-up content: blocks, line breaks, collapsed white space."""

from __future__ import annotations

import re

from tsdoc.ingest.headings import Heading

_SPACES = re.compile(r"[ \t\r\n\f]+")


class Flow:
    """Text that grows from inline pieces and block boundaries.

    Attributes:
        headings: Headings so far.
        anchors: Offset at which the text after each anchor begins.
        line: Line of the file that what is added next stands on; set by whoever adds.
        lines: (offset, line of the file) wherever the line changes.
    """

    def __init__(self) -> None:
        self.headings: list[Heading] = []
        self.anchors: dict[str, int] = {}
        self.line = 1
        self.lines: list[tuple[int, int]] = []
        self._out: list[str] = []
        self._len = 0
        self._newlines = 0
        self._space = False
        self._waiting: list[str] = []
        self._heading: tuple[int, int, int] | None = None

    def result(self) -> str:
        """Returns the text, ending with one newline unless empty."""
        self._place_anchors(self._len)
        text = "".join(self._out)
        return text if not text or text.endswith("\n") else text + "\n"

    def block(self, blank_lines: int = 0) -> None:
        """Ends the line if one is open, and leaves at least `blank_lines` blank ones."""
        self._newlines = max(self._newlines, blank_lines + 1)
        self._space = False

    def line_break(self) -> None:
        """Starts a new line within a block."""
        self._newlines += 1
        self._space = False

    def add(self, text: str) -> None:
        """Adds inline text; white space collapses as in HTML."""
        text = _SPACES.sub(" ", text)
        if text.startswith(" "):
            self._space, text = True, text[1:]
        if not text:
            return
        ends_with_space = text.endswith(" ")
        self._write(text.rstrip(" ") if ends_with_space else text)
        self._space = ends_with_space

    def add_exactly(self, text: str) -> None:
        """Adds text with its white space, as in `<pre>`."""
        if text:
            self._write(text)

    def anchor(self, name: str) -> None:
        """Notes that the text that comes next is what `name` points to."""
        self._waiting.append(name)

    def start_heading(self, depth: int) -> None:
        """Begins a heading; the text up to `end_heading` is its title."""
        self.block(1)
        self._heading = (depth, len(self._out), -1)

    def end_heading(self) -> None:
        """Ends a heading."""
        if self._heading is not None:
            depth, piece, start = self._heading
            title = " ".join("".join(self._out[piece:]).split())
            if title and start >= 0:
                self.headings.append(Heading(start=start, depth=depth, title=title))
        self._heading = None
        self.block(1)

    def _write(self, text: str) -> None:
        if self._len:
            gap = "\n" * self._newlines or " " * self._space
            self._out.append(gap)
            self._len += len(gap)
        self._newlines, self._space = 0, False
        if self._heading is not None and self._heading[2] < 0:
            self._heading = (*self._heading[:2], self._len)
        self._place_anchors(self._len)
        if not self.lines or self.lines[-1][1] != self.line:
            self.lines.append((self._len, self.line))
        self._out.append(text)
        self._len += len(text)

    def _place_anchors(self, offset: int) -> None:
        for name in self._waiting:
            self.anchors.setdefault(name, offset)
        self._waiting.clear()
