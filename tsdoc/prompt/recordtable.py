"""A `Document` without its texts as plain JSON values, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tsdoc.ingest.document import (
    Document,
    IngestWarning,
    Mark,
    PageStart,
    Section,
    SkippedFile,
    SourceFile,
)


def document_table(document: Document) -> dict[str, Any]:
    """Returns all of `document`, but of the sections' texts only their sizes in UTF-8."""
    return {
        "name": document.name,
        "files": [
            [f.name, None if f.path is None else str(f.path), f.kind, f.num_bytes, f.sha256]
            for f in document.files
        ],
        "sections": [
            [
                s.file,
                list(s.titles),
                s.first_line,
                [[page.start, page.number, page.label] for page in s.pages],
                [[mark.start, mark.number] for mark in s.lines],
                [[mark.start, mark.number] for mark in s.cells],
                len(s.text.encode("utf-8", "surrogatepass")),
            ]
            for s in document.sections
        ],
        "warnings": [[w.code, w.where, w.message] for w in document.warnings],
        "skipped": [[s.name, s.reason, s.num_bytes] for s in document.skipped],
    }


def document_from_table(table: dict[str, Any], text: bytes) -> Document:
    """Puts a document together from its table and the texts of its sections, joined, in UTF-8.

    Raises:
        KeyError, TypeError, ValueError: the table is not one that `document_table` made.
    """
    sections = []
    position = 0
    for file, titles, first_line, pages, lines, cells, size in table["sections"]:
        sections.append(
            Section(
                file=file,
                titles=tuple(titles),
                text=text[position : position + size].decode("utf-8", "surrogatepass"),
                first_line=first_line,
                pages=tuple(
                    PageStart(start=start, number=number, label=label)
                    for start, number, label in pages
                ),
                lines=_marks(lines),
                cells=_marks(cells),
            )
        )
        position += size
    return Document(
        name=table["name"],
        files=tuple(
            SourceFile(
                name=name,
                path=None if path is None else Path(path),
                kind=kind,
                num_bytes=num_bytes,
                sha256=sha256,
            )
            for name, path, kind, num_bytes, sha256 in table["files"]
        ),
        sections=tuple(sections),
        warnings=tuple(
            IngestWarning(code=code, where=where, message=message)
            for code, where, message in table["warnings"]
        ),
        skipped=tuple(
            SkippedFile(name=name, reason=reason, num_bytes=num_bytes)
            for name, reason, num_bytes in table["skipped"]
        ),
    )


def _marks(table: list[list[int]]) -> tuple[Mark, ...]:
    return tuple(Mark(start=start, number=number) for start, number in table)
