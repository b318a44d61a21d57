"""The one function that makes foreign text safe to show."""

from __future__ import annotations

import re

# C0 except \n and \t, DEL, C1, line/paragraph separators, bidi controls, and lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""Returns `text` with control characters as visible escapes (`\x1b`, `\u202e`).

    Everything that comes from documents, file names, metadata or a model passes here before it
    reaches a terminal. Newline and tab stay.
    """
    return _UNSAFE.sub(lambda m: m.group().encode("unicode_escape").decode("ascii"), text)


def visible_line(text: str) -> str:
    r"""Like `visible`, on one line: newline and tab become `\n` and `\t` as well."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")
