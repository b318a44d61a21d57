"""Repairs words that a PDF spells letter by letter, from where the letters stand."""

from __future__ import annotations

import ctypes
import itertools
import statistics
from typing import Any

_WORD_LEN = 3.2
_NUM_WORDS = 4
_EVEN = 1.25
_WORD_GAP = 1.6


def may_be_spread(line: str) -> bool:
    """Whether a line is all scraps of words, as `Post chi r ur gi e` is."""
    words = line.split()
    letters = sum(map(str.isalpha, line))
    return len(words) >= _NUM_WORDS and 0.8 * len("".join(words)) < letters <= _WORD_LEN * len(
        words
    )


def join_spread_letters(text_page: Any, text: str) -> str:
    """Returns `text` with lines joined where pdfium put spaces between evenly set letters.

    In a font without widths, or a heading with letter-spacing, gaps between letters look like
    word gaps. There the steps from letter to letter are as wide within words as between them, and
    only clearly wider ones are kept as spaces.
    """
    lines = text.split("\r\n")
    if not any(may_be_spread(line) for line in lines):
        return text
    spans = _line_spans(text_page)
    if len(spans) != len(lines):
        return text
    return "\r\n".join(
        _rejoined(text_page, line, span) if may_be_spread(line) else line
        for line, span in zip(lines, spans, strict=True)
    )


def _line_spans(text_page: Any) -> list[list[tuple[int, bool]]]:
    """Returns, per line, its characters' indices and whether a generated space precedes each."""
    import pypdfium2.raw as raw

    lines: list[list[tuple[int, bool]]] = [[]]
    spaced = False
    for index in range(text_page.count_chars()):
        char = raw.FPDFText_GetUnicode(text_page, index)
        if char == 0x0A:
            lines.append([])
        elif char == 0x20 and raw.FPDFText_IsGenerated(text_page, index):
            spaced = True
        elif char != 0x0D:
            lines[-1].append((index, spaced))
            spaced = False
    return lines


def _rejoined(text_page: Any, line: str, span: list[tuple[int, bool]]) -> str:
    """Returns a line with its generated spaces judged anew, or as it is if they are real gaps."""
    import pypdfium2.raw as raw

    starts = [_origin(text_page, index) for index, _ in span]
    steps = [abs(b - a) for a, b in itertools.pairwise(starts)]
    gaps = [step for step, (_, spaced) in zip(steps, span[1:], strict=True) if spaced]
    inner = [step for step, (_, spaced) in zip(steps, span[1:], strict=True) if not spaced]
    if not gaps or (inner and statistics.mean(gaps) > _EVEN * statistics.mean(inner)):
        return line
    usual = statistics.median(steps)
    chars = [chr(raw.FPDFText_GetUnicode(text_page, index)) for index, _ in span]
    rest = zip(chars[1:], steps, strict=True)
    return chars[0] + "".join(f" {c}" if step > _WORD_GAP * usual else c for c, step in rest)


def _origin(text_page: Any, index: int) -> float:
    import pypdfium2.raw as raw

    x, y = ctypes.c_double(), ctypes.c_double()
    raw.FPDFText_GetCharOrigin(text_page, index, x, y)
    return x.value
