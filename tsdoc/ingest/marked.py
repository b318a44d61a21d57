"""EPUB, DOCX and HTML, in tsdoc's own process: from the reader process's messages to sections."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from tsdoc.errors import InputError
from tsdoc.ingest.document import Mark
from tsdoc.ingest.extract import Extract, Part, Problem, say_problems, starts_within
from tsdoc.ingest.frames import Message
from tsdoc.ingest.headings import MAX_DEPTH, Heading, split_at
from tsdoc.ingest.options import Limits
from tsdoc.ingest.worker import Reading, Worker

_READERS = {
    "epub": "tsdoc.ingest.epub:read_epub",
    "docx": "tsdoc.ingest.docx:read_docx",
    "html": "tsdoc.ingest.html:read_page",
}


def read_marked(kind: str, path: Path, limits: Limits, worker: Worker) -> Extract:
    """Reads an "epub", "docx" or "html" file into sections along its contents or headings.

    Raises:
        InputError: not of that kind, protected, damaged, too large when decompressed, without
            any text.
    """
    request: Message = {
        "reader": _READERS[kind],
        "path": str(path),
        "limits": asdict(limits),
    }
    reading = worker.read(request)
    if not reading.messages:
        raise InputError(f"cannot be read: {reading.incomplete}")
    documents = reading.messages[1:] if kind == "epub" else reading.messages
    toc = reading.messages[0]["toc"] if kind == "epub" else []
    problems = _problems(reading, documents)
    text, starts = _joined(documents)
    if not text.strip():
        raise InputError(
            f"holds no text ({say_problems(problems)})" if problems else "holds no text"
        )
    listed = {entry["file"] for entry in toc}
    # A document that the contents do not mention still has its own headings.
    headings = [
        *_from_contents(toc, documents, starts),
        *_from_headings(documents, starts, listed),
    ]
    # Contents need not follow the reading order; sections do. The sort keeps ties in place.
    headings.sort(key=lambda heading: heading.start)
    lines = [Mark(start=start, number=line) for start, line in documents[0].get("lines", [])]
    return Extract(parts=_parts(text, headings, lines), problems=problems)


def _joined(documents: list[Message]) -> tuple[str, list[int]]:
    """Returns the text of all documents, blank lines between, and where each begins."""
    pieces: list[str] = []
    starts: list[int] = []
    at = 0
    for document in documents:
        starts.append(at)
        text: str = document.get("text", "")
        if text.strip():
            pieces.append(text + "\n")
            at += len(text) + 1
    return "".join(pieces), starts


def _from_contents(
    toc: list[Message], documents: list[Message], starts: list[int]
) -> list[Heading]:
    """Places the entries of a table of contents; one without a target opens with the next one."""
    if not toc:
        return []
    at = {document["file"]: number for number, document in enumerate(documents)}
    headings: list[Heading] = []
    waiting: list[Message] = []
    for entry in toc:
        if entry["depth"] > MAX_DEPTH or not entry["title"]:
            continue
        number = at.get(entry["file"])
        if number is None:
            waiting.append(entry)
            continue
        inside = documents[number].get("anchors", {}).get(entry["fragment"], 0)
        for named in (*waiting, entry):
            start = starts[number] + inside
            headings.append(Heading(start=start, depth=named["depth"], title=named["title"]))
        waiting = []
    return headings


def _from_headings(documents: list[Message], starts: list[int], listed: set[str]) -> list[Heading]:
    return [
        Heading(start=start + found["start"], depth=found["depth"], title=found["title"])
        for document, start in zip(documents, starts, strict=True)
        for found in document.get("headings", [])
        if found["depth"] <= MAX_DEPTH and document.get("file") not in listed
    ]


def _parts(text: str, headings: list[Heading], lines: list[Mark]) -> tuple[Part, ...]:
    """Cuts the text; its own lines are none of the file, which `lines` gives where it has any."""
    parts = []
    at = 0
    for part in split_at(text, headings):
        own = starts_within(lines, at, at + len(part.text))
        first = own[0].number if own else None
        parts.append(replace(part, first_line=first, lines=own))
        at += len(part.text)
    return tuple(parts)


def _problems(reading: Reading, documents: list[Message]) -> tuple[Problem, ...]:
    found = []
    for document in documents:
        if "failed" in document:
            name = document["file"]
            why = reading.failed.get(name)
            message = document["failed"] if why is None else why
            found.append(Problem(code="part_failed", message=message, place=name))
    if "contents" in reading.failed:
        why = reading.failed["contents"]
        found.append(Problem(code="contents_unread", message=f"the table of contents {why}"))
    if reading.incomplete is not None:
        message = f"the rest was given up: {reading.incomplete}"
        found.append(Problem(code="part_failed", message=message))
    return tuple(found)
