"""Keeps only the sections that `--section` names."""

from __future__ import annotations

from dataclasses import replace

from tsdoc.errors import InputError
from tsdoc.ingest.document import Document, Section

_SHOWN = 8


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
        raise InputError(f"no section is called {wanted!r}", hint=_hint(document))
    used = sorted({part.file for part in kept})
    renumbered = {old: new for new, old in enumerate(used)}
    return replace(
        document,
        files=tuple(document.files[old] for old in used),
        sections=tuple(replace(part, file=renumbered[part.file]) for part in kept),
    )


def _key(title: str) -> str:
    return " ".join(title.split()).casefold()


def _hint(document: Document) -> str:
    titles = list(dict.fromkeys(_outermost(part) for part in document.sections if part.titles))
    if not titles:
        return "The sources have no headings."
    more = ", …" if len(titles) > _SHOWN else ""
    return f"Sections: {', '.join(titles[:_SHOWN])}{more}."


def _outermost(part: Section) -> str:
    return part.titles[0]
