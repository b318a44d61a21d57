"""Lines as wide as a terminal, cut between words: whole ones, and text that is still growing."""

from __future__ import annotations

import re

LONGEST_WORD = 32  # columns; a longer one is shown while it grows, and may be cut by the terminal
TAB = 8
# A word, or what can be copied as a command: between backticks, or at the end behind a colon.
_UNBROKEN = re.compile(r"(?:(?<=: )tsdoc .*|(?:`[^`]*`|\S)+)\s*|\s+")


def word_wrapped(text: str, width: int | None) -> list[str]:
    """Cuts a line between words; a command to copy stays whole, however long it is."""
    from rich.cells import cell_len

    if width is None or cell_len(text) <= width:
        return [text]
    lines = [""]
    for part in _UNBROKEN.findall(text):
        if lines[-1].strip() and cell_len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


class GrowingText:
    """Cuts text into lines while it comes: a word is held back until it is known to fit.

    Lines are cut at white space, and around characters of two columns, whose scripts have none.
    """

    def __init__(self) -> None:
        self._width = 1
        self._column = 0
        self._gap = ""  # white space before the word
        self._word = ""
        self._divisible = True  # whether a line may be cut before the word

    @property
    def begun(self) -> bool:
        """Whether the last line holds anything."""
        return bool(self._column or self._gap or self._word)

    def add(self, text: str, width: int) -> str:
        """Takes the next piece; returns what can be shown now on a terminal of `width` columns."""
        from rich.cells import cell_len

        self._width = width
        shown = ""
        for char in text:
            if char == "\n":
                shown += self._place() + "\n"
                self._column, self._divisible = 0, True
            elif char in " \t":
                if self._word:
                    shown += self._place()
                self._gap, self._divisible = self._gap + char, True
            elif cell_len(char) > 1:
                shown += self._place() if self._word else ""
                self._word, self._divisible = char, True
                shown += self._place()
                self._divisible = True
            else:
                self._word += char
                if cell_len(self._word) >= LONGEST_WORD:
                    shown += self._place()
        return shown

    def end(self) -> str:
        """Returns what was held back; the next line begins."""
        shown = self._place()
        self._column, self._divisible = 0, True
        return shown

    def _place(self) -> str:
        """Puts the word behind the line, or at the beginning of the next one."""
        from rich.cells import cell_len

        gap, word = self._gap, self._word
        self._gap = self._word = ""
        length = cell_len(word)
        end = self._column
        for char in gap:
            end += TAB - end % TAB if char == "\t" else 1
        end += length
        cut = end > self._width and self._divisible and self._column > 0
        self._divisible = False
        if cut:
            self._column = length if word else self._column
            return f"\n{word}" if word else ""
        self._column = (end - 1) % self._width + 1 if end else 0  # where a terminal cuts it
        return gap + word
