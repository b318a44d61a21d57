"""Tables for stdout as plain lines: foreign text in them is visible, and never read as markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from tsdoc.terminal import visible_line

GAP = "  "
INDENT = "    "
MIN_SHRUNK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        right: Numbers stand right.
        shrinks: May be cut where the terminal is narrow.
        max_width: Longer cells are cut in any case.
        below: Stands on a line of its own below the others where the terminal is narrow; only the
            last column can.
    """

    title: str
    right: bool = False
    shrinks: bool = False
    max_width: int | None = None
    below: bool = False


def table_lines(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], *, width: int | None
) -> list[str]:
    """Returns the title line and one line for each row; cut text ends in "…".

    Args:
        columns: What stands in each row.
        rows: Cells; control characters in them are made visible.
        width: Cells a line may take; None where there is no limit.
    """
    titles = [column.title for column in columns]
    cells = [[visible_line(cell) for cell in row] for row in [titles, *rows]]
    if columns[-1].below and width is not None and _natural_width(cells) > width:
        above = table_lines(columns[:-1], (row[:-1] for row in cells[1:]), width=width)
        below = [f"{INDENT}{_cut(row[-1], width - len(INDENT))}" for row in cells]
        return [line for pair in zip(above, below, strict=True) for line in pair]
    widths = [max(cell_len(row[number]) for row in cells) for number in range(len(columns))]
    for number, column in enumerate(columns):
        if column.max_width is not None:
            widths[number] = min(widths[number], column.max_width)
    if width is not None:
        _shrink(columns, widths, width - len(GAP) * (len(columns) - 1))
    return [
        GAP.join(
            _fit(cell, widths[number], right=columns[number].right)
            for number, cell in enumerate(row)
        ).rstrip()
        for row in cells
    ]


def _natural_width(cells: Sequence[Sequence[str]]) -> int:
    widths = (max(cell_len(cell) for cell in column) for column in zip(*cells, strict=True))
    return sum(widths) + len(GAP) * (len(cells[0]) - 1)


def _shrink(columns: Sequence[Column], widths: list[int], width: int) -> None:
    """Shares what the other columns leave among those that shrink, the narrowest first."""
    order = [number for number, column in enumerate(columns) if column.shrinks]
    order.sort(key=lambda number: widths[number])
    left = width - sum(w for n, w in enumerate(widths) if n not in order)
    for count, number in zip(range(len(order), 0, -1), order, strict=True):
        widths[number] = min(widths[number], max(left // count, MIN_SHRUNK))
        left -= widths[number]


def _fit(cell: str, width: int, *, right: bool) -> str:
    cell = _cut(cell, width)
    padding = " " * (width - cell_len(cell))
    return f"{padding}{cell}" if right else f"{cell}{padding}"


def _cut(cell: str, width: int) -> str:
    return cell if cell_len(cell) <= width else f"{set_cell_size(cell, width - 1)}…"
