"""Jupyter notebooks: cells with their text output, without images and other encoded data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tsdoc.errors import InputError
from tsdoc.ingest.document import Mark
from tsdoc.ingest.extract import Extract, Part, starts_within
from tsdoc.ingest.headings import Heading, split_at
from tsdoc.ingest.markdown import markdown_headings

_ENCODED = re.compile(r"(?:data:[\w/+.-]+;base64,)?(?:[A-Za-z0-9+/]{76}\s?){2,}[A-Za-z0-9+/=\s]*")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def read_notebook(text: str) -> Extract:
    """Reads a notebook (formats 3 and 4) into sections along the headings of its text cells.

    Each cell begins with a line such as `[cell 3, code]`; text output follows under
    `[cell 3, output]`. Encoded data of 150 characters or more is replaced by a note.

    Raises:
        InputError: no notebook.
    """
    try:
        book = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError("is not a valid notebook (not JSON)") from error
    cells = _cells(book)
    if cells is None:
        raise InputError("is not a valid notebook (it has no cells)")
    pieces: list[str] = []
    marks: list[Mark] = []
    headings: list[Heading] = []
    at = 0
    for number, cell in enumerate(cells, 1):
        kind = str(cell.get("cell_type", "raw"))
        for label, content in _contents(kind, cell):
            mark = f"[cell {number}, {label}]\n"
            body = _ENCODED.sub("[encoded data left out]", _ESCAPES.sub("", content))
            if label == "markdown":
                found = list(markdown_headings(body))
                for heading in found:
                    # A cell that opens with a heading belongs below it with its mark.
                    start = at if heading.start == 0 else at + len(mark) + heading.start
                    headings.append(Heading(start=start, depth=heading.depth, title=heading.title))
            piece = mark + body.rstrip("\n") + "\n\n"
            pieces.append(piece)
            marks.append(Mark(start=at, number=number))
            at += len(piece)
    return Extract(parts=tuple(_parts("".join(pieces), headings, marks)))


def _parts(text: str, headings: list[Heading], cells: list[Mark]) -> Iterator[Part]:
    """Cuts the text; its lines are not the file's, which is JSON, so cells give the places."""
    at = 0
    for part in split_at(text, headings):
        own = starts_within(cells, at, at + len(part.text))
        yield replace(part, first_line=None, cells=own)
        at += len(part.text)


def _cells(book: Any) -> list[dict[str, Any]] | None:
    if not isinstance(book, dict):
        return None
    cells = book.get("cells")
    if cells is None and isinstance(book.get("worksheets"), list):
        sheets = [sheet for sheet in book["worksheets"] if isinstance(sheet, dict)]
        cells = [cell for sheet in sheets for cell in sheet.get("cells") or []]
    if not isinstance(cells, list):
        return None
    return [cell for cell in cells if isinstance(cell, dict)]


def _contents(kind: str, cell: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (label, text) for a cell's source and for all of its text output."""
    source = _joined(cell.get("source", cell.get("input")))
    if kind == "heading":
        level = cell.get("level")
        kind, source = "markdown", "#" * (level if isinstance(level, int) else 1) + " " + source
    if source.strip():
        yield kind, source
    outputs = cell.get("outputs")
    shown = (
        [_output(o) for o in outputs if isinstance(o, dict)] if isinstance(outputs, list) else []
    )
    if any(shown):
        yield "output", "\n".join(text.rstrip("\n") for text in shown if text)


def _output(output: dict[str, Any]) -> str:
    """Returns what an output says in plain text; an image alone says `[image]`."""
    if output.get("output_type") in ("error", "pyerr"):
        trace = _joined(output.get("traceback"), "\n")
        return trace or f"{output.get('ename', '')}: {output.get('evalue', '')}"
    if "text" in output:
        return _joined(output["text"])
    data = output.get("data")
    if not isinstance(data, dict):
        return ""
    for kind in ("text/plain", "text/markdown", "text/latex", "text/html"):
        if kind in data:
            return _joined(data[kind])
    images = [kind for kind in data if str(kind).startswith("image/")]
    return "[image]" if images else ""


def _joined(value: Any, between: str = "") -> str:
    if isinstance(value, list):
        return between.join(str(item) for item in value)
    return value if isinstance(value, str) else ""
