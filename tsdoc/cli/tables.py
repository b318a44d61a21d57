"""Tables for stdout: foreign text in them is visible, and never read as markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from tsdoc.terminal import visible_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column: numbers stand right; one that `shrinks` is cut where the terminal is narrow."""

    title: str
    right: bool = False
    shrinks: bool = False


def build_table(columns: Sequence[Column], rows: Iterable[Sequence[str]]) -> Table:
    """Returns a table without lines around it; cells are plain text."""
    cells = [[visible_line(cell) for cell in row] for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        title = visible_line(column.title)
        widest = max(map(cell_len, [title, *(row[number] for row in cells)]))
        table.add_column(
            Text(title),
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=None if column.shrinks else widest,
        )
    for row in cells:
        table.add_row(*map(Text, row))
    return table
