"""How text of foreign origin and sizes are shown to people."""

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


def escaped_json(text: str) -> str:
    r"""Returns JSON with control characters, and lone surrogates, which UTF-8 lacks, as `\u202e`.

    They stand in its strings alone, so that nothing of what it says is changed.
    """
    return _UNSAFE.sub(lambda m: f"\\u{ord(m.group()):04x}", text)


def format_count(number: int, name: str, plural: str | None = None) -> str:
    """Returns "1 part" or "3 parts"; `plural` where it is no mere s."""
    return f"1 {name}" if number == 1 else f"{number:,} {plural or f'{name}s'}"


def format_bytes(num_bytes: int) -> str:
    """Returns a size as people read it: "512 B", "12.5 MB", "1.3 GB" (decimal units)."""
    for scale, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {name}"
    return f"{num_bytes} B"


def parse_bytes(text: str) -> int | None:
    """Returns the bytes of a size as it is shown, "10 GB", or "10000000000"; None if it is none."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,3})?)\s*([kMGT]?)B?", text.strip(), re.I | re.A)
    if match is None:
        return None
    return int(float(match[1]) * 1000 ** " kmgt".index(match[2].lower() or " "))


def format_duration(seconds: float) -> str:
    """Returns a time of this magnitude: "95 s", "7 min", "1 h 20 min"."""
    if seconds < 119.5:
        return f"{round(seconds)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
