"""PDF by pypdf: opens files that pdfium does not, and gives a second opinion on a page's text."""

from __future__ import annotations

import logging
import re
import struct
import zlib
from pathlib import Path
from typing import Any

from tsdoc.errors import InputError
from tsdoc.ingest.pdf_pdfium import password_error
from tsdoc.ingest.pdf_quality import PageText

# What pypdf is seen to raise on damaged files, besides its own errors.
_RAISED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)
_OVERPRINTED = re.compile(r"^(.{8,}?)\1+$", re.MULTILINE)
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]")


class PypdfFile:
    """See `PdfFile`.

    Raises:
        InputError: pypdf cannot open the file, or its password is missing or wrong.
    """

    def __init__(self, path: Path, password: str | None) -> None:
        import pypdf
        from pypdf.errors import LimitReachedError, PyPdfError

        logging.getLogger("pypdf").setLevel(logging.CRITICAL)
        self._limit_error = LimitReachedError
        self._errors: tuple[type[Exception], ...] = (PyPdfError, *_RAISED)
        self._file = path.open("rb")
        try:
            self._pdf: Any = pypdf.PdfReader(self._file, strict=False)
            self.encrypted = bool(self._pdf.is_encrypted)
            if self.encrypted and not self._pdf.decrypt(password or ""):
                raise password_error(password)
            self.num_pages = len(self._pdf.pages)
        except self._errors as error:
            raise InputError("is damaged: no PDF reader can open it") from error

    def text(self, index: int) -> PageText:
        """Returns the text of a page; pypdf does not say which characters it cannot decode."""
        try:
            text = self._pdf.pages[index].extract_text()
        except self._limit_error as error:
            raise InputError("is too large when decompressed") from error
        except self._errors as error:
            raise InputError("cannot be read") from error
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        return PageText(text=_OVERPRINTED.sub(r"\1", _CONTROLS.sub("", text)))

    def outline(self) -> list[tuple[int, str, int]]:
        """Returns (depth from 1, title, page index) per entry that leads to a page."""
        entries: list[tuple[int, str, int]] = []
        try:
            self._collect(self._pdf.outline, 1, entries)
        except self._errors as error:
            raise InputError("has an outline that cannot be read") from error
        return entries

    def labels(self) -> list[str | None]:
        """Returns the printed label of each page, where there is one."""
        try:
            if "/PageLabels" not in self._pdf.root_object:
                return [None] * self.num_pages
            return [str(label) or None for label in self._pdf.page_labels]
        except self._errors as error:
            raise InputError("has page labels that cannot be read") from error

    def _collect(self, nodes: list[Any], depth: int, entries: list[tuple[int, str, int]]) -> None:
        for node in nodes:
            if isinstance(node, list):
                self._collect(node, depth + 1, entries)
                continue
            index = self._pdf.get_destination_page_number(node)
            if index is not None and index >= 0:
                entries.append((depth, str(node.title or ""), index))
