"""What the user can ask of the readers, and the limits they keep."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1024 * 1024
LAST_PAGE = 10**9  # stands for the end of a document of any length


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Explicit limits against oversized or hostile input.

    Attributes:
        text_bytes: Largest plain-text file.
        pdf_bytes: Largest PDF.
        archive_bytes: Largest EPUB or DOCX file.
        member_bytes: Largest member of an archive once inflated.
        inflated_bytes: All members of one archive that are read, inflated.
        num_members: Members an archive may have.
        inflate_ratio: Inflated bytes per packed byte allowed in a member over 1 MiB.
        worker_bytes: Memory a reader process may allocate.
        unit_cpu_s: CPU seconds for one unit of work of a reader process (opening, one page, …).
        unit_wall_s: Seconds after which a reader process that stays silent is given up.
        num_restarts: Crashes of the reader process after which the rest of a file is given up.
    """

    text_bytes: int = 64 * MIB
    pdf_bytes: int = 1024 * MIB
    archive_bytes: int = 512 * MIB
    member_bytes: int = 32 * MIB
    inflated_bytes: int = 256 * MIB
    num_members: int = 20_000
    inflate_ratio: int = 200
    worker_bytes: int = 512 * MIB
    unit_cpu_s: float = 5.0
    unit_wall_s: float = 60.0
    num_restarts: int = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestOptions:
    """What is read of the sources.

    Attributes:
        pages: Physical document pages to read as inclusive (first, last) pairs, an open end being
            LAST_PAGE; None is all.
            Concerns files that have pages; others beside them are read whole, with a warning.
        section: Read only sections with this heading (case and spacing do not matter; a part of
            the heading suffices where no heading equals it), with what lies below them.
        include: Globs in the syntax of .gitignore; where given, only matching files are read.
        exclude: Globs in the syntax of .gitignore; matching files are left out.
        password: For encrypted documents.
        strict: Trouble with a part of the input is an error.
        limits: See `Limits`.
    """

    pages: tuple[tuple[int, int], ...] | None = None
    section: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    password: str | None = field(default=None, repr=False)
    strict: bool = False
    limits: Limits = field(default_factory=Limits)

    @property
    def part(self) -> str:
        """What of the sources is read, for people: "pages 1-5, 9-"; "" for all."""
        said = []
        if self.pages is not None:
            ranges = (_page_range(first, last) for first, last in self.pages)
            said.append(f"pages {', '.join(ranges)}")
        if self.section is not None:
            said.append(f"section {self.section}")
        said += [f"only {glob}" for glob in self.include]
        said += [f"without {glob}" for glob in self.exclude]
        return "; ".join(said)


def _page_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{'' if last == LAST_PAGE else last}"
