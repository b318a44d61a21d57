"""PDF, in the reader process: pdfium first, pypdf where pdfium's text is poor or it fails.

Measured on real files: pdfium is several times faster and separates words where pypdf glues them;
each reads some broken files that the other does not. So every page is read by pdfium, judged, and
read again by pypdf only when the text is bad; the better of the two stays.

Messages: first `{"num_pages", "labels", "outline", "repaired", "encrypted"}`, then one per wanted
page: `{"page", "text", "undecodable", "blank"}` or `{"page", "failed"}`, pages counted from 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from tsdoc.errors import InputError
from tsdoc.ingest.frames import Begin, Message
from tsdoc.ingest.pdf_quality import PageText, badness

_TAIL_BYTES = 1 << 20
_POOR = 0.02


class PdfFile(Protocol):
    """A PDF opened by one of the two readers.

    Methods raise InputError for what the reader cannot do.
    """

    @property
    def num_pages(self) -> int:
        """Number of pages."""

    @property
    def encrypted(self) -> bool:
        """Whether it was decrypted to be read."""

    def text(self, index: int) -> PageText:
        """Returns the text of a page."""

    def outline(self) -> list[tuple[int, str, int]]:
        """Returns (depth from 1, title, page index) per entry that leads to a page."""

    def labels(self) -> list[str | None]:
        """Returns the printed label of each page, where there is one."""


class _Readers:
    """Opens the two readers when they are needed; knows what must not be tried again."""

    def __init__(self, request: Message, begin: Begin) -> None:
        self.path = Path(request["path"])
        self.failed = set(request["failed"])
        self.begin = begin
        self._password: str | None = request["password"]
        self._open: dict[str, PdfFile] = {}
        self._refused: dict[str, InputError] = {}

    def get(self, engine: str) -> PdfFile | None:
        """Returns the file as `engine` opened it, or None if it cannot."""
        unit = f"opening ({engine})"
        if engine not in self._open and engine not in self._refused and unit not in self.failed:
            self.begin(unit, 0)
            try:
                self._open[engine] = _open(engine, self.path, self._password)
            except InputError as error:
                self._refused[engine] = error
        return self._open.get(engine)

    def first(self) -> PdfFile:
        """Returns the file opened by the first reader that can."""
        opened = self.get("pdfium") or self.get("pypdf")
        if opened is None:
            raise next(iter(self._refused.values()), InputError("crashes every PDF reader"))
        return opened


def read_pdf(request: Message, begin: Begin) -> Iterator[Message]:
    """Reads a PDF; see the module for the messages.

    The request holds `path`, `password`, `pages` (a list of [first, last], or None).

    Raises:
        InputError: neither reader can open the file, or its password is missing or wrong.
    """
    readers = _Readers(request, begin)
    first = readers.first()
    done = int(request["done"])
    if done == 0:
        yield _head(first, readers)
    for index in _wanted(request["pages"], first.num_pages)[max(0, done - 1) :]:
        yield {"page": index + 1, **_read_page(index, readers)}


def _open(engine: str, path: Path, password: str | None) -> PdfFile:
    if engine == "pdfium":
        from tsdoc.ingest.pdf_pdfium import PdfiumFile

        return PdfiumFile(path, password)
    from tsdoc.ingest.pdf_pypdf import PypdfFile

    return PypdfFile(path, password)


def _wanted(pages: list[list[int]] | None, num_pages: int) -> list[int]:
    """Returns the indices of the wanted pages, ascending."""
    if pages is None:
        return list(range(num_pages))
    return sorted({n - 1 for low, high in pages for n in range(low, min(high, num_pages) + 1)})


def _head(opened: PdfFile, readers: _Readers) -> Message:
    head: Message = {
        "num_pages": opened.num_pages,
        "encrypted": opened.encrypted,
        "repaired": is_damaged(readers.path),
        "outline": [],
        "labels": [],
    }
    for key, ask in (("outline", opened.outline), ("labels", opened.labels)):
        if key not in readers.failed:
            readers.begin(key, 0)
            try:
                head[key] = ask()
            except InputError as error:
                head[f"{key}_failed"] = error.message
    return head


def _read_page(index: int, readers: _Readers) -> Message:
    """Reads one page with pdfium, and with pypdf where that gave poor text or none."""
    best: PageText | None = None
    why = "cannot be read"
    for engine in ("pdfium", "pypdf"):
        unit = f"page {index + 1} ({engine})"
        opened = None if unit in readers.failed else readers.get(engine)
        if opened is None or index >= opened.num_pages:
            continue
        readers.begin(unit, 0)
        try:
            page = opened.text(index)
        except InputError as error:
            why = error.message
            continue
        if best is None or badness(page.text) < badness(best.text):
            best = page
        if best.blank or badness(best.text) <= _POOR:
            break
    if best is None:
        return {"failed": why}
    return asdict(best)


def is_damaged(path: Path) -> bool:
    """Whether the end of the file does not lead to a cross-reference table where it says."""
    with path.open("rb") as file:
        head_at = max(0, file.read(1024).find(b"%PDF-"))
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        found = re.findall(rb"startxref\s*(\d{1,12})", file.read())
        if not found:
            return True
        for offset in (int(found[-1]), int(found[-1]) + head_at):
            file.seek(min(offset, size))
            if re.match(rb"\s*(xref|\d+\s+\d+\s+obj)", file.read(64)):
                return False
    return True
