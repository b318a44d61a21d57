"""What `--pages` and `--section` leave of the files, and what they can do for a document."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from textwrap import shorten

from tsdoc.errors import InputError
from tsdoc.ingest.document import Document, IngestWarning, SkippedFile
from tsdoc.terminal import format_count, visible_line

NO_SECTION = "no such section"
"""Why a file is left out that has no section of the kind asked for; a warning says so."""

PAGED = frozenset({"pdf"})
"""The kinds of files that have pages."""

_SHOWN = 5
_NEAR = 0.6  # as difflib.get_close_matches has it
_COMPARED = 200  # characters of a title
_TITLE = 60  # characters of it that are shown
_FILES = 3  # that a warning names


def check_pages(kinds: Mapping[str, str]) -> Iterator[IngestWarning]:
    """Yields a warning where `--pages` concerns some of the files only.

    Args:
        kinds: Of every file by its name.

    Raises:
        InputError: no file has pages.
    """
    without = [name for name, kind in kinds.items() if kind not in PAGED]
    if not without:
        return
    if len(without) == len(kinds):
        one = len(kinds) == 1
        lacking = "has no pages" if one else f"none of the {len(kinds):,} files has pages"
        raise InputError(
            f"{lacking}, and --pages asks for some",
            where=without[0] if one else None,
            hint="Only PDFs have pages. Use --section TITLE where there are headings, or a file "
            "that holds only the part.",
        )
    have = "1 file has" if len(without) == 1 else f"{len(without):,} files have"
    are = "is" if len(without) == 1 else "are"
    message = f"{have} no pages and {are} read whole: {_first(without)}"
    yield IngestWarning(code="file_without_pages", where="--pages", message=message)


def ways_to_narrow(document: Document) -> str:
    """Returns the options that can make a document smaller: "--pages or --section", or ""."""
    ways = []
    if len({page.number for part in document.sections for page in part.pages}) > 1:
        ways.append("--pages")
    if len(document.sections) > 1 and any(part.titles for part in document.sections):
        ways.append("--section")
    if len(document.files) > 1:
        ways.append("--exclude")
    *others, last = ways or [""]
    return f"{', '.join(others)} or {last}" if others else last


def narrow_to_section(document: Document, wanted: str) -> Document:
    """Returns the document with only the sections under a heading.

    A heading fits if it equals `wanted`, case and spacing apart; where none does, if it contains
    it. Sections below a fitting heading are kept with it. Files that keep no section are left out,
    which a warning says.

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
    dropped = [file for number, file in enumerate(document.files) if number not in renumbered]
    skipped = (
        SkippedFile(name=file.name, reason=NO_SECTION, num_bytes=file.num_bytes) for file in dropped
    )
    return replace(
        document,
        warnings=(*document.warnings, *_say_dropped([file.name for file in dropped], wanted)),
        skipped=(*document.skipped, *skipped),
        files=tuple(document.files[old] for old in used),
        sections=tuple(replace(part, file=renumbered[part.file]) for part in kept),
    )


def _say_dropped(names: Sequence[str], wanted: str) -> Iterator[IngestWarning]:
    if names:
        count = format_count(len(names), "file")
        yield IngestWarning(
            code="file_without_section",
            where=f"--section '{visible_line(wanted)}'",
            message=f"left out: {count} without such a section ({_first(names)})",
        )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_FILES]) + (", …" if len(names) > _FILES else "")


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
