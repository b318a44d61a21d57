"""Letters and line ends of a PDF's text: ligatures, soft hyphens, words cut at line ends."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LIGATURES = str.maketrans(
    {
        "\ufb00": "ff",
        "\ufb01": "fi",
        "\ufb02": "fl",
        "\ufb03": "ffi",
        "\ufb04": "ffl",
        "\ufb05": "st",
        "\ufb06": "st",
    }
)
_WORD = re.compile(r"[^\W\d_]+")
_COMPOUND = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)+")
_CUT = re.compile(r"([^\W\d_]+)-\n([^\W\d_]+)")


def fold(text: str) -> str:
    """Returns `text` with ligatures as plain letters and without soft hyphens."""
    text = text.translate(_LIGATURES)
    return re.sub("\u00ad\n?", "", text) if "\u00ad" in text else text


def join_hyphens(texts: Sequence[str]) -> list[str]:
    r"""Joins words that a line end cut, where the rest of the document shows how they are spelt.

    `docu-\nmentation` becomes `documentation` if that word stands somewhere in the document;
    `line-\nend` becomes `line-end` if that does. Everything else stays as it is: a hyphen that
    may be the author's is never dropped.

    Args:
        texts: The text of each page.
    """
    words: set[str] = set()
    compounds: set[str] = set()
    for text in texts:
        words.update(word.lower() for word in _WORD.findall(text))
        compounds.update(word.lower() for word in _COMPOUND.findall(text))

    def joined(found: re.Match[str]) -> str:
        left, right = found[1], found[2]
        if f"{left}-{right}".lower() in compounds:
            return f"{left}-{right}"
        if right[0].islower() and (left + right).lower() in words:
            return left + right
        return found[0]

    return [_CUT.sub(joined, text) for text in texts]
