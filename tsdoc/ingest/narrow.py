"""Keeps only the sections that `--section` names."""

from __future__ import annotations

import difflib
from dataclasses import replace
from textwrap import shorten

from tsdoc.errors import InputError
from tsdoc.ingest.document import Document
from tsdoc.terminal import format_count

_SHOWN = 5
_NEAR = 0.6  # as difflib.get_close_matches has it
_COMPARED = 200  # characters of a title
_TITLE = 60  # characters of it that are shown


def narrow_to_section(document: Document, wanted: str) -> Document:
    """Returns the document with only the sections under a heading.

    A heading fits if it equals `wanted`, case and spacing apart; where none does, if it contains
    it. Sections below a fitting heading are kept with it. Files that keep no section are dropped.

    Raises:
        InputError: no heading fits.
    """
    key = _key(wanted)
    kept = [part for part in document.sections if key in map(_key, part.titles)]
    if not kept:
        kept = [p for p in document.sections if any(key in _key(title) for title in p.titles)]
    if not kept or not key:
        raise InputError(f"no section is called {wanted!r}", hint=_hint(document, wanted))
    used = sorted({part.file for part in kept})
    renumbered = {old: new for new, old in enumerate(used)}
    return replace(
        document,
        files=tuple(document.files[old] for old in used),
        sections=tuple(replace(part, file=renumbered[part.file]) for part in kept),
    )


def _key(title: str) -> str:
    return " ".join(title.split()).casefold()


def _hint(document: Document, wanted: str) -> str:
    """Names the titles nearest to `wanted`, or where none is near the first ones."""
    titles = list(dict.fromkeys(title for part in document.sections for title in part.titles))
    if not titles:
        return "The sources have no headings."
    likeness = {title: _likeness(_key(wanted), _key(title)) for title in titles}
    near = sorted((t for t in titles if likeness[t] >= _NEAR), key=lambda t: -likeness[t])
    found = ", ".join(
        f'"{shorten(title, _TITLE, placeholder="…")}"' for title in (near or titles)[:_SHOWN]
    )
    lead = f"The nearest: {found}" if near else f"None is like it; the first: {found}"
    count = format_count(len(titles), "title")
    return f"{lead}. `tsdoc tokens SOURCE --all` lists all {count}."


def _likeness(wanted: str, title: str) -> float:
    """How like a title, or as many words in a row of it, is to what was asked for, 0 to 1."""
    if not wanted:
        return 0.0
    words, length = title[:_COMPARED].split(), len(wanted.split())
    runs = (" ".join(words[n : n + length]) for n in range(len(words) - length + 1))
    matcher = difflib.SequenceMatcher(b=wanted[:_COMPARED], autojunk=False)
    best = 0.0
    for text in {title[:_COMPARED], *runs}:
        matcher.set_seq1(text)
        if matcher.real_quick_ratio() > best and matcher.quick_ratio() > best:
            best = max(best, matcher.ratio())
    return best
