"""How good the text of a document page is, so that the better of two readers can be chosen."""

from __future__ import annotations

import re
from dataclasses import dataclass

_WORD = re.compile(r"[^\W\d_]+")
_LONG_WORD = 22
_PRIVATE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010fffd]")
_BROKEN = re.compile("[\ue000-\uf8ff\U000f0000-\U0010fffd\ufffd]")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageText:
    """The text of a page.

    Attributes:
        undecodable: Share of characters whose font does not say what they mean.
        blank: Whether the page is known to show nothing at all.
    """

    text: str
    undecodable: float = 0.0
    blank: bool = False


def badness(text: str) -> float:
    """Returns 0 for good text, more for worse, infinity for none.

    Glued words show as a share of words over 22 letters (good text has almost none), lost letters
    as private-use and replacement characters. A long word may be one: German and chemistry have
    them, so that a single one does not count on a page with few words.
    """
    if not text.strip():
        return float("inf")
    words = _WORD.findall(text)
    num_long = sum(len(word) > _LONG_WORD and not _is_one_script_run(word) for word in words)
    num_broken = len(_BROKEN.findall(text))
    counts = num_long > 1 or len(words) < 5
    long_ratio = num_long / len(words) if words and counts else 0.0
    return long_ratio + 5 * num_broken / len(text)


def num_private(text: str) -> int:
    """Returns the number of private-use characters: letters whose meaning the file does not say."""
    return len(_PRIVATE.findall(text))


def _is_one_script_run(word: str) -> bool:
    """Whether a script without spaces between words explains the length (Han, kana, Thai …)."""
    return sum(char > "\u0e00" for char in word) * 2 > len(word)
