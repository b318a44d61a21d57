"""From the SOURCEs of a command to the files to read, in order, each once."""

from __future__ import annotations

import functools
import io
import os
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from tsdoc.errors import InputError
from tsdoc.ingest.document import IngestWarning, SkippedFile
from tsdoc.ingest.kinds import HEAD_BYTES, kind_of, kind_of_bytes, kind_of_zip, why_left_out
from tsdoc.ingest.narrow import check_pages
from tsdoc.ingest.options import IngestOptions, Limits
from tsdoc.ingest.patterns import Patterns
from tsdoc.ingest.repository import list_folder
from tsdoc.regular import NotRegularError, open_regular
from tsdoc.terminal import visible_line

EXCLUDED = "excluded"
"""Why a file is left out that the user's own --include or --exclude leaves out."""

EMPTY = "empty"
"""Why a file is left out that holds nothing."""

UNREADABLE = "not readable"
"""Why a file is left out whose warning says more."""

_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A file to read.

    Attributes:
        name: Unique name within the document, safe to show.
        path: Where it lies; None for standard input.
        data: The bytes of standard input.
        named: Whether the user named the file itself, so that trouble with it is an error.
    """

    name: str
    path: Path | None
    kind: str
    num_bytes: int
    data: bytes | None = None
    named: bool

    def open(self) -> BinaryIO:
        """Opens the file for reading.

        Raises:
            InputError: it cannot be opened, or is no longer a regular file.
        """
        if self.data is not None:
            return io.BytesIO(self.data)
        assert self.path is not None  # noqa: S101 - either data or path, by construction
        return _open(self.path, self.name, follow=False)


@dataclass(slots=True)
class Gathered:
    """What `gather` found."""

    items: list[Item] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)
    warnings: list[IngestWarning] = field(default_factory=list)


def gather(sources: Sequence[str], options: IngestOptions) -> Gathered:
    """Finds the files of all sources: in the order given, path order inside a folder.

    Raises:
        InputError: a source is missing, unreadable, of no use, or a URL; or pages are asked for
            and no file has any.
    """
    collector = _Collector(options)
    for source in sources:
        collector.add(source)
    found = collector.finish()
    found.warnings.extend(collector.patterns.unmatched())
    if options.pages is not None:
        found.warnings.extend(check_pages({item.name: item.kind for item in found.items}))
    return found


def _open(path: Path, name: str, *, follow: bool = True) -> BinaryIO:
    """Opens a file that is called `name`.

    Raises:
        InputError: it cannot be opened, or is a pipe, a device, a folder.
    """
    try:
        return open_regular(path, follow=follow)
    except NotRegularError as error:
        raise _not_regular(name) from error
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=name) from error


def _not_regular(name: str) -> InputError:
    return InputError("is not a regular file", where=name, hint="Pipe it in and name it '-'.")


def shown_name(path: str) -> str:
    r"""Returns a file name as it can be shown and stored: odd bytes as `\xf5`, one line."""
    plain = os.fsencode(path).decode("utf-8", "backslashreplace")
    return visible_line(plain)


@functools.lru_cache(maxsize=1)
def _bytes_of(stream: BinaryIO) -> bytes:
    # A pipe can be read once per process, but both its hash and its text are asked for.
    return stream.read()


class _Collector:
    """Collects items; knows which real files and which names are taken."""

    def __init__(self, options: IngestOptions) -> None:
        self.found = Gathered()
        self._limits: Limits = options.limits
        self.patterns = Patterns(options)
        self._names: set[str] = set()
        self._seen: set[str] = set()
        self._named: set[str] = set()
        self._links: list[tuple[SkippedFile, str]] = []

    def finish(self) -> Gathered:
        """Returns what was found; links to files that are sources themselves are not left out."""
        read = [entry for entry, target in self._links if target in self._named]
        self.found.skipped = [entry for entry in self.found.skipped if entry not in read]
        return self.found

    def add(self, source: str) -> None:
        if source == "-":
            self._add_stdin()
            return
        if not source:
            # As a path it would be the current directory, where a variable of a script is not set.
            raise InputError("the name of a SOURCE is empty", hint="A folder's own name is '.'.")
        if _URL.match(source):
            raise InputError(
                "is a URL, and tsdoc reads files", where=source, hint="Download it first."
            )
        path = Path(source)
        where = shown_name(source)
        try:
            # A pipe of the shell's, /dev/fd/63, can be opened and has no path of its own.
            mode = path.stat().st_mode
            if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
                raise _not_regular(where)
            real = path.resolve(strict=True)
        except FileNotFoundError as error:
            raise InputError("no such file or folder", where=where) from error
        except OSError as error:
            raise InputError(f"cannot be read ({error.strerror})", where=where) from error
        except (RuntimeError, ValueError) as error:
            raise InputError(f"cannot be read ({error})", where=where) from error
        if stat.S_ISDIR(mode):
            self._add_folder(real, where)
        else:
            self._add_file(real, where, path.name or real.name)

    def _add_stdin(self) -> None:
        gone = sys.stdin is None or sys.stdin.closed
        if gone or sys.stdin.isatty():
            what = "is closed" if gone else "is a terminal, not a document"
            raise InputError(
                f"standard input {what}",
                where="-",
                hint="Pipe a document in: tsdoc ask - < FILE.",
            )
        if "-" in self._seen:
            return
        self._seen.add("-")
        data = _bytes_of(sys.stdin.buffer)
        if not data:
            raise InputError("standard input is empty", where="-")
        kind = kind_of_bytes(data)
        if kind is None:
            raise InputError("standard input is of no kind that tsdoc reads", where="-")
        self._check_size(kind, len(data), "-")
        name = self._free_name("stdin", "stdin")
        self.found.items.append(
            Item(name=name, path=None, kind=kind, num_bytes=len(data), data=data, named=True)
        )

    def _add_file(self, real: Path, where: str, base: str) -> None:
        if str(real) in self._seen:
            return
        if not self.patterns.wants(base):
            self._skip(shown_name(base), EXCLUDED, _size(real))
            return
        self._seen.add(str(real))
        self._named.add(str(real))
        with _open(real, where) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            kind = _kind(base, file)
        if num_bytes == 0:
            raise InputError("is empty", where=where)
        if kind is None:
            raise InputError("is a binary file of no kind that tsdoc reads", where=where)
        self._check_size(kind, num_bytes, where)
        name = self._free_name(shown_name(base), shown_name(f"{real.parent.name}/{base}"))
        self.found.items.append(
            Item(name=name, path=real, kind=kind, num_bytes=num_bytes, named=True)
        )

    def _check_size(self, kind: str, num_bytes: int, where: str) -> None:
        limit = size_limit(kind, self._limits)
        if num_bytes > limit:
            raise InputError(
                f"is too large ({num_bytes:,} bytes; the limit for {kind} is {limit:,})",
                where=where,
            )

    def _add_folder(self, root: Path, where: str) -> None:
        before = len(self.found.items), len(self.found.skipped)
        listing = list_folder(root)
        prefix = self._free_prefix(root, listing.paths)
        for note in listing.notes:
            self.found.warnings.append(IngestWarning(code="folder", where=where, message=note))
        for path in listing.unreadable:
            message = "folder cannot be listed (permission denied?)"
            self._warn_unreadable(f"{prefix}{shown_name(path)}/", message, 0)
        for path in listing.paths:
            name = prefix + shown_name(path)
            if str(root / path) in self._seen:
                continue
            if self.patterns.wants(path):
                self._add_member(root, path, name)
            else:
                self._skip(name, EXCLUDED, _size(root / path))
        if len(self.found.items) == before[0] and not self._seen_below(root):
            reasons = sorted({entry.reason for entry in self.found.skipped[before[1] :]})
            detail = f" (left out: {', '.join(reasons)})" if reasons else ""
            if EXCLUDED in reasons:
                detail += f"; given: {self.patterns}"
            raise InputError(f"holds no file that tsdoc can read{detail}", where=where)

    def _add_member(self, root: Path, path: str, name: str) -> None:
        full = root / path
        try:
            if full.is_symlink() or not _stays_inside(full):
                link = self._skip(name, "link", 0)
                self._links.append((link, os.path.realpath(full)))
                return
            mode = full.lstat().st_mode
            if not stat.S_ISREG(mode):
                self._skip(name, "not a regular file", 0)
                return
            with _open(full, name, follow=False) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                head = file.read(HEAD_BYTES)
                kind = _kind(path, file)
        except (InputError, OSError) as error:
            message = error.message if isinstance(error, InputError) else "cannot be read"
            self._warn_unreadable(name, message, _size(full))
            return
        why = self._why_skipped(path, kind, head, num_bytes)
        if why is not None or kind is None:
            self._skip(name, why or "binary", num_bytes)
            return
        self._seen.add(str(full))
        name = self._free_name(name, name)  # two odd names may be shown alike
        self.found.items.append(
            Item(name=name, path=full, kind=kind, num_bytes=num_bytes, named=False)
        )

    def _why_skipped(self, path: str, kind: str | None, head: bytes, num_bytes: int) -> str | None:
        if num_bytes == 0:
            return EMPTY
        if kind is None:
            return "binary"
        if num_bytes > size_limit(kind, self._limits):
            return "too large"
        asked_for = self.patterns.includes(path)
        return why_left_out(path, head) if kind == "text" and not asked_for else None

    def _skip(self, name: str, reason: str, num_bytes: int) -> SkippedFile:
        self.found.skipped.append(SkippedFile(name=name, reason=reason, num_bytes=num_bytes))
        return self.found.skipped[-1]

    def _warn_unreadable(self, name: str, message: str, num_bytes: int) -> None:
        self._skip(name, UNREADABLE, num_bytes)
        self.found.warnings.append(IngestWarning(code="unreadable", where=name, message=message))

    def _seen_below(self, root: Path) -> bool:
        return any(path.startswith(f"{root}/") for path in self._seen)

    def _free_prefix(self, root: Path, paths: Sequence[str]) -> str:
        """Returns what tells the names of a folder's files apart from those taken: "" or "docs/".

        All of them get it, so that one folder stays one folder.
        """
        shown = [shown_name(path) for path in paths if str(root / path) not in self._seen]
        prefix, number = "", 1
        while any(prefix + name in self._names for name in shown):
            prefix = shown_name(root.name) + (f" ({number})/" if number > 1 else "/")
            number += 1
        return prefix

    def _free_name(self, name: str, longer: str) -> str:
        """Returns the name, or the one with its folder, or a numbered one: the first not taken.

        Only names taken earlier count, so that adding a source never renames those before it.
        """
        candidate, number = name, 1
        if candidate in self._names:
            candidate = longer
        while candidate in self._names:
            number += 1
            candidate = f"{longer} ({number})"
        self._names.add(candidate)
        return candidate


def size_limit(kind: str, limits: Limits) -> int:
    """Returns the largest file of a kind that is read, in bytes."""
    if kind == "pdf":
        return limits.pdf_bytes
    return limits.archive_bytes if kind in ("epub", "docx") else limits.text_bytes


def _kind(name: str, file: BinaryIO) -> str | None:
    file.seek(0)
    kind = kind_of(name, file.read(HEAD_BYTES))
    return kind_of_zip(file) if kind == "zip" else kind


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _stays_inside(full: Path) -> bool:
    """Whether no folder on the way to `full` (below a resolved root) is a link."""
    return os.path.realpath(full.parent) == str(full.parent)
