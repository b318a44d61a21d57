"""Reads the sources of a command into one `Document`, and tells whether they have changed."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from tsdoc.errors import InputError, PartialInputError, UsageError
from tsdoc.ingest.chapters import split_text
from tsdoc.ingest.decode import decode
from tsdoc.ingest.document import Document, IngestWarning, Section, SkippedFile, SourceFile
from tsdoc.ingest.extract import LOSSES, Extract
from tsdoc.ingest.gather import UNREADABLE, Item, gather, shown_name
from tsdoc.ingest.headings import split_at
from tsdoc.ingest.markdown import split_markdown
from tsdoc.ingest.marked import read_marked
from tsdoc.ingest.narrow import narrow_to_section
from tsdoc.ingest.notebook import read_notebook
from tsdoc.ingest.options import IngestOptions
from tsdoc.ingest.pdf import read_pdf
from tsdoc.ingest.worker import Worker

__all__ = [
    "READER_VERSION",
    "IngestOptions",
    "SourceFingerprint",
    "check_complete",
    "check_options",
    "fingerprint_sources",
    "read_sources",
]

READER_VERSION = 2
"""Grows when a reader would give another text for the same file."""

_IN_WORKER = frozenset({"pdf", "epub", "docx", "html"})
_PROSE = frozenset({"", ".txt", ".text"})

Progress = Callable[[str, int, int], None]
"""Told (name of the file, bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFingerprint:
    """What decides the text of a set of sources.

    Attributes:
        digest: Hex digest over reader version, options, and name and content hash of every file,
            with what was left out and why; the order does not matter.
        names: Names of the files in the order they would be read in.
        paths: Where these lie, None for standard input; the digest does not depend on it.
        num_bytes: Bytes that were hashed.
    """

    digest: str
    names: tuple[str, ...]
    paths: tuple[Path | None, ...]
    num_bytes: int


def read_sources(
    sources: Sequence[str], options: IngestOptions, on_progress: Progress | None = None
) -> Document:
    """Reads all sources.

    Args:
        sources: Paths of files and folders, `-` for standard input.
        options: What to read of them.
        on_progress: Told about progress in bytes.

    Raises:
        InputError: a source is missing, unreadable, empty, of no known kind, a URL; or no text
            is left; or pages or a section are asked for that no file has.
        PartialInputError: part of the input could not be read and `options.strict` is set.
        UsageError: no source, or impossible page ranges.
    """
    check_options(sources, options)
    gathered = gather(sources, options)
    builder = _Builder(options, gathered.items, on_progress)
    with Worker(options.limits) as worker:
        for item in gathered.items:
            builder.add(item, worker)
    document = Document(
        name=_document_name(sources, builder.files),
        files=tuple(builder.files),
        sections=tuple(builder.sections),
        warnings=(*gathered.warnings, *builder.warnings),
        skipped=(*gathered.skipped, *builder.skipped),
    )
    if options.strict:
        check_complete(document)
    if not document.files:
        raise _nothing_read(document)
    return document if options.section is None else narrow_to_section(document, options.section)


def fingerprint_sources(sources: Sequence[str], options: IngestOptions) -> SourceFingerprint:
    """Hashes the sources as `read_sources` would read them, without reading their text.

    Standard input is read to its end once and kept for `read_sources`.

    Raises:
        InputError: as `read_sources` for what shows without reading the text.
        UsageError: no source, or impossible page ranges.
    """
    check_options(sources, options)
    gathered = gather(sources, options)
    digest = hashlib.sha256()
    num_bytes = 0
    asked = asdict(options)
    for hidden in ("password", "strict"):
        del asked[hidden]
    _feed(digest, [READER_VERSION, asked])
    parts = [[entry.name, entry.reason] for entry in gathered.skipped]
    for item in gathered.items:
        with item.open() as file:
            content, size = _hash(file)
        num_bytes += size
        parts.append([item.name, item.kind, content])
    for part in sorted(parts):
        _feed(digest, part)
    return SourceFingerprint(
        digest=digest.hexdigest(),
        names=tuple(item.name for item in gathered.items),
        paths=tuple(item.path for item in gathered.items),
        num_bytes=num_bytes,
    )


def check_complete(document: Document) -> None:
    """Raises for a document of which something is missing, as `--strict` asks.

    Raises:
        PartialInputError: a warning says that part of the input was not read.
    """
    losses = [warning for warning in document.warnings if warning.code in LOSSES]
    if losses:
        more = f" (and {len(losses) - 1} more)" if len(losses) > 1 else ""
        raise PartialInputError(
            f"{losses[0].message}{more}",
            where=losses[0].where,
            hint="Without --strict the rest is read.",
        )


def check_options(sources: Sequence[str], options: IngestOptions) -> None:
    """Checks what can be checked without looking at any source.

    Raises:
        UsageError: no source, or impossible page ranges.
    """
    if not sources:
        raise UsageError("no SOURCE given")
    for low, high in options.pages or ():
        if not 1 <= low <= high:
            raise UsageError(
                f"page range {low}-{high} is impossible",
                hint="Pages count from 1: --pages 100-180.",
            )


class _Builder:
    """Reads items one after the other and collects what a `Document` is made of."""

    def __init__(
        self, options: IngestOptions, items: Sequence[Item], on_progress: Progress | None
    ) -> None:
        self.files: list[SourceFile] = []
        self.sections: list[Section] = []
        self.warnings: list[IngestWarning] = []
        self.skipped: list[SkippedFile] = []
        self._options = options
        self._total = sum(item.num_bytes for item in items)
        self._done = 0
        self._on_progress = on_progress

    def add(self, item: Item, worker: Worker) -> None:
        """Reads one item; trouble with a file that the user did not name becomes a warning."""
        try:
            file, extract = self._read(item, worker)
        except InputError as error:
            if item.named:
                raise InputError(
                    error.message, where=error.where or item.name, hint=error.hint
                ) from error
            self._skip(item, error)
        else:
            number = len(self.files)
            self.files.append(file)
            for part in extract.parts:
                self.sections.append(
                    Section(
                        file=number,
                        titles=part.titles,
                        text=part.text,
                        first_line=part.first_line,
                        pages=part.pages,
                        lines=part.lines,
                        cells=part.cells,
                    )
                )
            for problem in extract.problems:
                where = item.name if problem.place is None else f"{item.name}, {problem.place}"
                self.warnings.append(
                    IngestWarning(code=problem.code, where=where, message=problem.message)
                )
        self._done += item.num_bytes
        self._tell(item, 0)

    def _skip(self, item: Item, error: InputError) -> None:
        reason = "no text" if isinstance(error, _NoTextError) else UNREADABLE
        self.skipped.append(SkippedFile(name=item.name, reason=reason, num_bytes=item.num_bytes))
        if reason == UNREADABLE:
            message = f"{error.message}. {error.hint}" if error.hint else error.message
            self.warnings.append(IngestWarning(code="unreadable", where=item.name, message=message))

    def _tell(self, item: Item, extra: int) -> None:
        if self._on_progress is not None:
            self._on_progress(item.name, self._done + extra, self._total)

    def _read(self, item: Item, worker: Worker) -> tuple[SourceFile, Extract]:
        with item.open() as file:
            if item.kind in _IN_WORKER:
                content, size = _hash(file)
                extract = self._read_in_worker(item, worker)
                if item.data is None and _changed(item, content):
                    raise InputError("changed while it was being read")
            else:
                data = file.read(self._options.limits.text_bytes + 1)
                content, size = hashlib.sha256(data).hexdigest(), len(data)
                extract = _read_text(item, data)
        if not any(part.text.strip() for part in extract.parts):
            raise _NoTextError("holds no text")
        source = SourceFile(
            name=item.name, path=item.path, kind=item.kind, num_bytes=size, sha256=content
        )
        return source, extract

    def _read_in_worker(self, item: Item, worker: Worker) -> Extract:
        def on_page(done: int, total: int) -> None:
            self._tell(item, item.num_bytes * done // total)

        with _on_disk(item) as path:
            if item.kind == "pdf":
                return read_pdf(path, self._options, worker, on_page)
            return read_marked(item.kind, path, self._options.limits, worker)


class _NoTextError(InputError):
    """A file holds nothing but white space."""


def _read_text(item: Item, data: bytes) -> Extract:
    decoded = decode(data)
    text = decoded.text
    if not text.strip():
        return Extract(parts=())
    if item.kind == "notebook":
        return read_notebook(text)
    if item.kind == "markdown":
        parts = split_markdown(text)
    elif item.path is None or item.path.suffix.lower() in _PROSE:
        parts = split_text(text)
    else:
        parts = split_at(text, ())
    return Extract(parts=parts, problems=decoded.problems)


@contextmanager
def _on_disk(item: Item) -> Iterator[Path]:
    """Gives a path for a reader process; standard input goes to a private temporary file."""
    if item.path is not None:
        yield item.path
        return
    with tempfile.NamedTemporaryFile(prefix="tsdoc-") as file:
        file.write(item.data or b"")
        file.flush()
        yield Path(file.name)


def _hash(file: BinaryIO) -> tuple[str, int]:
    """Returns the hex SHA-256 and the size of a whole file."""
    file.seek(0)
    digest = hashlib.sha256()
    num_bytes = 0
    while block := file.read(1 << 20):
        digest.update(block)
        num_bytes += len(block)
    return digest.hexdigest(), num_bytes


def _changed(item: Item, content: str) -> bool:
    """Whether the path leads to another content now than when it was hashed."""
    with item.open() as again:
        return _hash(again)[0] != content


def _feed(digest: hashlib._Hash, value: object) -> None:
    digest.update(json.dumps(value, sort_keys=True).encode() + b"\n")


def _document_name(sources: Sequence[str], files: Sequence[SourceFile]) -> str:
    first = "stdin" if sources[0] == "-" else Path(sources[0]).resolve().name or "/"
    return shown_name(first) if len(sources) == 1 else f"{shown_name(first)} and more"


def _nothing_read(document: Document) -> InputError:
    losses = [warning for warning in document.warnings if warning.code in LOSSES]
    reasons = sorted({entry.reason for entry in document.skipped})
    detail = f" (left out: {', '.join(reasons)})" if reasons else ""
    for first in (losses or document.warnings)[:1]:
        detail = f": {first.where} {first.message}"
    return InputError(f"nothing to read in the sources given{detail}")
