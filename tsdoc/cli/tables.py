"""Tables for stdout as plain lines: foreign text in them is visible, and never read as markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from rich.cells import cell_len, chop_cells, set_cell_size

from tsdoc.cli.wrapping import word_wrapped
from tsdoc.terminal import visible_line

GAP = "  "
INDENT = "    "
MIN_SHRUNK = 8
LONG_WORD = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        right: Numbers stand right.
        shrinks: May be cut where the terminal is narrow.
        wraps: May take several lines there instead, cut between words.
        max_width: Longer cells are cut in any case.
        below: Stands on lines of its own below the others where the terminal is narrow; only the
            last column can.
    """

    title: str
    right: bool = False
    shrinks: bool = False
    wraps: bool = False
    max_width: int | None = None
    below: bool = False


def table_lines(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], *, width: int | None
) -> list[str]:
    """Returns the title line and one for each row, more where text wraps; cut text ends in "…".

    Args:
        columns: What stands in each row.
        rows: Cells; control characters in them are made visible.
        width: Cells a line may take; None where there is no limit.
    """
    titles = [column.title for column in columns]
    cells = [[visible_line(cell) for cell in row] for row in [titles, *rows]]
    if columns[-1].below and width is not None and _natural_width(cells) > width:
        above = _aligned(columns[:-1], [row[:-1] for row in cells], width=width)
        room = width - len(INDENT)
        below = [[f"{INDENT}{line}" for line in _wrapped(row[-1], room)] for row in cells]
        return [line for lines in zip(above, below, strict=True) for line in chain(*lines)]
    return list(chain(*_aligned(columns, cells, width=width)))


def _aligned(
    columns: Sequence[Column], cells: Sequence[Sequence[str]], *, width: int | None
) -> list[list[str]]:
    """Returns the lines of each row."""
    widths = [max(cell_len(row[number]) for row in cells) for number in range(len(columns))]
    for number, column in enumerate(columns):
        if column.max_width is not None:
            widths[number] = min(widths[number], column.max_width)
    if width is not None:
        least = [_least(column, (row[n] for row in cells)) for n, column in enumerate(columns)]
        _shrink(columns, widths, least, width - len(GAP) * (len(columns) - 1))
    return [_row_lines(columns, row, widths) for row in cells]


def _row_lines(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> list[str]:
    stacks = [
        _wrapped(cell, width) if column.wraps else [_cut(cell, width)]
        for column, cell, width in zip(columns, row, widths, strict=True)
    ]
    return [
        GAP.join(
            _padded(text, width, right=column.right)
            for column, text, width in zip(columns, texts, widths, strict=True)
        ).rstrip()
        for texts in zip_longest(*stacks, fillvalue="")
    ]


def _natural_width(cells: Sequence[Sequence[str]]) -> int:
    widths = (max(cell_len(cell) for cell in column) for column in zip(*cells, strict=True))
    return sum(widths) + len(GAP) * (len(cells[0]) - 1)


def _least(column: Column, cells: Iterable[str]) -> int:
    """Returns the least width of a column: words of usual length stay whole where cells wrap."""
    if not column.wraps:
        return MIN_SHRUNK
    words = (cell_len(word) for cell in cells for word in cell.split(" "))
    return max((length for length in words if length <= LONG_WORD), default=MIN_SHRUNK)


def _shrink(columns: Sequence[Column], widths: list[int], least: Sequence[int], width: int) -> None:
    """Shares what the other columns leave among those that shrink, the narrowest first."""
    order = [n for n, column in enumerate(columns) if column.shrinks or column.wraps]
    order.sort(key=lambda number: widths[number])
    left = width - sum(w for n, w in enumerate(widths) if n not in order)
    if sum(least[number] for number in order) > left:  # words cannot all stay whole
        least = [MIN_SHRUNK] * len(columns)
    for count, number in zip(range(len(order), 0, -1), order, strict=True):
        widths[number] = min(widths[number], max(left // count, least[number]))
        left -= widths[number]


def _padded(cell: str, width: int, *, right: bool) -> str:
    padding = " " * (width - cell_len(cell))
    return f"{padding}{cell}" if right else f"{cell}{padding}"


def _wrapped(cell: str, width: int) -> list[str]:
    """Returns a cell in lines, cut between words; a word that is longer than a line, anywhere."""
    lines = word_wrapped(cell, width)
    return [piece for line in lines for piece in chop_cells(line, width) or [""]]


def _cut(cell: str, width: int) -> str:
    return cell if cell_len(cell) <= width else f"{set_cell_size(cell, width - 1)}…"
