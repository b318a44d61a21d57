"""PDF by pdfium."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tsdoc.errors import InputError
from tsdoc.ingest.pdf_columns import order_columns
from tsdoc.ingest.pdf_quality import PageText
from tsdoc.ingest.pdf_spacing import join_spread_letters

_PASSWORD_ERROR = 4
_SAMPLES = 64
_RULES = 12
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe\uffff]")
_MAX_OUTLINE_DEPTH = 15


class PdfiumFile:
    """See `PdfFile`.

    Raises:
        InputError: pdfium cannot open the file, or its password is missing or wrong.
    """

    def __init__(self, path: Path, password: str | None) -> None:
        import pypdfium2

        self._errors = pypdfium2.PdfiumError
        # Through a file object: pdfium's own opening takes no name that is not UTF-8.
        self._file = path.open("rb")
        try:
            self._pdf: Any = pypdfium2.PdfDocument(self._file, password=password)
        except self._errors as error:
            if getattr(error, "err_code", None) == _PASSWORD_ERROR:
                raise password_error(password) from error
            raise InputError("is damaged: no PDF reader can open it") from error

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return len(self._pdf)

    @property
    def encrypted(self) -> bool:
        """Whether it was decrypted to be read."""
        import pypdfium2.raw as raw

        return bool(raw.FPDF_GetSecurityHandlerRevision(self._pdf) >= 0)

    def text(self, index: int) -> PageText:
        """Returns the text of a page."""
        try:
            page = self._pdf[index]
        except self._errors as error:
            raise InputError("cannot be loaded") from error
        try:
            text_page = page.get_textpage()
            try:
                text = text_page.get_text_range()
                undecodable = _undecodable(text_page)
                text = join_spread_letters(text_page, text)
                text = order_columns(text_page, text, page.get_width())
                blank = not text.strip() and _is_blank(page)
            finally:
                text_page.close()
        except self._errors as error:
            raise InputError("has no readable text") from error
        finally:
            page.close()
        return PageText(text=_clean(text), undecodable=undecodable, blank=blank)

    def outline(self) -> list[tuple[int, str, int]]:
        """Returns (depth from 1, title, page index) per entry that leads to a page."""
        entries = []
        try:
            for mark in self._pdf.get_toc(max_depth=_MAX_OUTLINE_DEPTH):
                target = mark.get_dest()
                index = None if target is None else target.get_index()
                if index is not None and index >= 0:
                    entries.append((mark.level + 1, mark.get_title(), index))
        except self._errors as error:
            raise InputError("has an outline that cannot be read") from error
        return entries

    def labels(self) -> list[str | None]:
        """Returns the printed label of each page, where there is one."""
        return [self._pdf.get_page_label(index) or None for index in range(self.num_pages)]


def password_error(password: str | None) -> InputError:
    """Returns the error for a PDF that does not open with this password."""
    if password is None:
        return InputError("is encrypted", hint="Give its password with --password-file FILE.")
    return InputError("is encrypted, and the password given is wrong")


def _is_blank(page: Any) -> bool:
    """Whether a page without text shows nothing but perhaps a few rules and boxes."""
    import pypdfium2.raw as raw

    kinds = [item.type for item in page.get_objects(max_depth=3)]
    plain = (raw.FPDF_PAGEOBJ_PATH, raw.FPDF_PAGEOBJ_FORM, raw.FPDF_PAGEOBJ_TEXT)
    return len(kinds) <= _RULES and all(kind in plain for kind in kinds)


def _undecodable(text_page: Any) -> float:
    """Returns the share of sampled characters whose font does not say what they mean."""
    import pypdfium2.raw as raw

    count = text_page.count_chars()
    indices = range(0, count, max(1, count // _SAMPLES))
    errors = sum(raw.FPDFText_HasUnicodeMapError(text_page, index) == 1 for index in indices)
    return errors / len(indices) if indices else 0.0


def _clean(text: str) -> str:
    # U+FFFE stands for a hyphen at a line end; pdfium drops the line end behind it.
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\ufffe", "-\n")
    return _CONTROLS.sub("", text)
