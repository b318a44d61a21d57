"""How many tokens a text will be, without a tokenizer."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

# Tokens per character of each class, fitted to byte-level vocabularies of 50k to 150k entries.
_PER_WORD = 1.0
_PER_LETTER = 0.055
_PER_DIGIT = 0.8
_PER_MARK = 0.7
_PER_NEWLINE = 0.45
_PER_INDENT = 0.7
_PER_TWO_BYTES = 0.5
_PER_THREE_BYTES = 0.8
_PER_FOUR_BYTES = 2.0


def estimate_tokens(text: str) -> int:
    """Returns about how many tokens `text` is; the same for every model, never below 1 if any.

    Made of counts of words, letters, digits, other marks and non-ASCII characters, so that it is
    usable for prose, code and other scripts alike. Shown to users with "≈".
    """
    data = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
    if data.size == 0:
        return 0
    folded = data | 0x20
    letter = (folded >= ord("a")) & (folded <= ord("z"))
    capital = letter & (data < ord("a"))
    # Words begin after what is no letter, and inside names such as `camelCase`.
    words = int(letter[0]) + _count(letter[1:] & (~letter[:-1] | (capital[1:] & ~capital[:-1])))
    letters = _count(letter)
    digits = _count((data >= ord("0")) & (data <= ord("9")))
    blank = (data == ord(" ")) | (data == ord("\t"))
    blanks = _count(blank)
    indents = _count(blank[1:] & blank[:-1] & ~np.append(False, blank[:-2]))
    newlines = _count(data == ord("\n"))
    marks = _count(data < 0x80) - letters - digits - blanks - newlines
    total = (
        words * _PER_WORD
        + letters * _PER_LETTER
        + digits * _PER_DIGIT
        + marks * _PER_MARK
        + newlines * _PER_NEWLINE
        + indents * _PER_INDENT
        + _count((data >= 0xC0) & (data < 0xE0)) * _PER_TWO_BYTES
        + _count((data >= 0xE0) & (data < 0xF0)) * _PER_THREE_BYTES
        + _count(data >= 0xF0) * _PER_FOUR_BYTES
    )
    return max(1, math.ceil(total))


def _count(mask: npt.NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(mask))
