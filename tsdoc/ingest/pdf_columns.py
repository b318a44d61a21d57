"""Reading order of pages in two columns whose lines a PDF draws across both.

pdfium gives text in the order in which it is drawn. Nearly all programs draw column by column;
where one draws line by line, left and right halves of lines alternate, and a page of prose becomes
unreadable. Such a page is put in order from where its pieces stand; every other page is left alone,
tables above all: their rows have to stay together.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MIN_ROWS = 6
_MAX_PIECES = 4000
_LINE_WORDS = 4.0  # columns of prose have more words to a line; cells of tables fewer
_FILLED = 0.75  # of its column's width a line of prose fills, as a rule
_GUTTER = 6.0  # points
_STEP = 2.0  # points


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of text on one line: left, bottom, right, top in points."""

    left: float
    bottom: float
    right: float
    top: float


def order_columns(text_page: Any, text: str, width: float) -> str:
    """Returns the page's text, column by column where it was drawn across two of them.

    Args:
        text_page: pdfium's text page.
        text: Its text, in the order in which it is drawn.
        width: Of the page, in points.
    """
    pieces = _pieces(text_page)
    if len(pieces) < 2 * _MIN_ROWS:
        return text
    gutter = _find_gutter(pieces, width)
    if gutter is None or not _is_drawn_across(pieces, gutter):
        return text
    left = [piece for piece in pieces if piece.right <= gutter]
    right = [piece for piece in pieces if piece.left >= gutter]
    if not (_is_prose(text_page, left) and _is_prose(text_page, right)):
        return text
    across = [piece for piece in pieces if piece.left < gutter < piece.right]
    ordered = "\r\n".join(_in_order(text_page, left, right, across))
    # Every letter must still be there; otherwise the pieces were not what they seemed.
    return ordered if _letters(ordered) == _letters(text) else text


def _letters(text: str) -> list[str]:
    return sorted(char for char in text if not char.isspace())


def _pieces(text_page: Any) -> list[_Piece]:
    import pypdfium2.raw as raw

    count = min(text_page.count_rects(), _MAX_PIECES + 1)
    if count > _MAX_PIECES:
        return []
    found = []
    left, top, right, bottom = (ctypes.c_double() for _ in range(4))
    for index in range(count):
        if raw.FPDFText_GetRect(text_page, index, left, top, right, bottom):
            found.append(_Piece(left.value, bottom.value, right.value, top.value))
    return found


def _find_gutter(pieces: Sequence[_Piece], width: float) -> float | None:
    """Returns the middle of the widest gap near the page's middle that few pieces cross."""
    places = [place * _STEP for place in range(int(0.3 * width / _STEP), int(0.7 * width / _STEP))]
    allowed = len(pieces) // 10
    best: list[float] = []
    run: list[float] = []
    for place in places:
        crossed = sum(piece.left < place < piece.right for piece in pieces)
        run = [*run, place] if crossed <= allowed else []
        best = max(best, run, key=len)
    if not best or best[-1] - best[0] < _GUTTER:
        return None
    return (best[0] + best[-1]) / 2


def _is_drawn_across(pieces: Sequence[_Piece], gutter: float) -> bool:
    """Whether most lines go on at once with their right half, line after line."""
    halves = [piece for piece in pieces if not piece.left < gutter < piece.right]
    across = sum(
        one.right <= gutter <= other.left and abs(one.bottom - other.bottom) < one.top - one.bottom
        for one, other in itertools.pairwise(halves)
    )
    return across >= _MIN_ROWS


def _lines(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Joins pieces that stand on one line; from top to bottom."""
    lines: list[_Piece] = []
    for piece in sorted(pieces, key=lambda piece: -piece.top):
        if lines and (piece.top + piece.bottom) / 2 > lines[-1].bottom:
            last = lines[-1]
            lines[-1] = _Piece(
                min(last.left, piece.left),
                min(last.bottom, piece.bottom),
                max(last.right, piece.right),
                max(last.top, piece.top),
            )
        else:
            lines.append(piece)
    return lines


def _is_prose(text_page: Any, pieces: Sequence[_Piece]) -> bool:
    lines = _lines(pieces)
    if len(lines) < _MIN_ROWS:
        return False
    width = max(line.right for line in lines) - min(line.left for line in lines)
    filled = statistics.median((line.right - line.left) / width for line in lines)
    words = statistics.mean(len(_text_of(text_page, line).split()) for line in lines)
    return filled >= _FILLED and words >= _LINE_WORDS


def _in_order(
    text_page: Any,
    left: Sequence[_Piece],
    right: Sequence[_Piece],
    across: Sequence[_Piece],
) -> list[str]:
    """Returns the lines: between lines that run across the page, left column, then right one."""
    rows = []
    rest = [_lines(left), _lines(right)]
    for bar in [*_lines(across), None]:
        for number, column in enumerate(rest):
            above = [line for line in column if bar is None or line.bottom >= bar.bottom]
            rows += [_text_of(text_page, line) for line in above]
            rest[number] = column[len(above) :]
        if bar is not None:
            rows.append(_text_of(text_page, bar))
    return rows


def _text_of(text_page: Any, line: _Piece) -> str:
    text: str = text_page.get_text_bounded(line.left, line.bottom, line.right, line.top)
    return " ".join(text.split())
