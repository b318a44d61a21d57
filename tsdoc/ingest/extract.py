"""What a reader returns for one file, before files are put together as a `Document`."""

from __future__ import annotations

from dataclasses import dataclass

from tsdoc.ingest.document import PageStart

LOSSES = frozenset(
    {
        "decoded_lossily",
        "page_failed",
        "page_undecodable",
        "page_without_text",
        "part_failed",
        "private_characters",
        "unreadable",
    }
)
"""Warning codes that mean that something of the input is missing: `--strict` stops on these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A section of one file; see `Section`, which it becomes."""

    titles: tuple[str, ...]
    text: str
    first_line: int | None = None
    pages: tuple[PageStart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Trouble with a part of a file: a code as in `IngestWarning`, and where within the file."""

    code: str
    message: str
    place: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extract:
    """The text of one file, every character once, in reading order."""

    parts: tuple[Part, ...]
    problems: tuple[Problem, ...] = ()
