"""What is known of where an answer came from: passages with their places, and coverage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tsdoc.ingest.document import Place

CoverageUnit = Literal["page", "page_or_file", "file", "section"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A stretch of the document that the model looked at.

    Attributes:
        text: As it stands in the document.
        lead: What stands before it in its line.
        first: Where its first character came from.
        last: Where its last character came from.
        section: Number of its section in the document.
        start: First character in the section's text.
        end: After the last.
        num_tokens: Tokens that spell it.
        position: Of its middle in the document, 0 to 1.
        share: Of the evidence in the whole document, 0 to 1.
        attention: Of the attention that was paid to the document, 0 to 1.
    """

    text: str
    lead: str
    first: Place
    last: Place
    section: int
    start: int
    end: int
    num_tokens: int
    position: float
    share: float
    attention: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How widely attention was spread.

    Attributes:
        unit: What is counted: pages, pages and the files that have none, files, or sections.
        holding: The fewest of them that hold 90 % of the attention paid to the document.
        total: All of them.
    """

    unit: CoverageUnit
    holding: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the model looked at for one answer, which is no proof of it.

    Attributes:
        passages: Best first.
        coverage: None where the document is a single page or section.
        stands_out: Whether a passage drew clearly more than it does for any question.
        strip: Evidence along the document, in equal parts of its tokens; the largest is 1.
    """

    passages: tuple[Passage, ...]
    coverage: Coverage | None
    stands_out: bool
    strip: tuple[float, ...]


def evidence_from_json(value: Mapping[str, Any]) -> Evidence:
    """Returns what `dataclasses.asdict` made of evidence, and a JSON file kept."""
    coverage = value["coverage"]
    return Evidence(
        passages=tuple(_passage_from_json(passage) for passage in value["passages"]),
        coverage=None if coverage is None else Coverage(**coverage),
        stands_out=value["stands_out"],
        strip=tuple(value["strip"]),
    )


def _passage_from_json(value: Mapping[str, Any]) -> Passage:
    places = {
        name: Place(**{**value[name], "titles": tuple(value[name]["titles"])})
        for name in ("first", "last")
    }
    return Passage(**{**value, **places})
