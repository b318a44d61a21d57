"""The passages below an answer: as lines, as JSON, as a page."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tsdoc.cli.run import EVIDENCE, Run
from tsdoc.errors import UsageError

if TYPE_CHECKING:
    from tsdoc.config import ResolvedSettings
    from tsdoc.evidence import Coverage, Evidence, Passage
    from tsdoc.ingest.document import Place

HEADING = "What the model looked at most (where to check, not a proof):"
WIDTH = 100  # longer lines are hard to read, however wide the terminal
UNITS = {
    "page": "pages",
    "page_or_file": "pages, and files without pages",
    "file": "files",
    "section": "sections",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedPassages:
    """Which passages are looked for, and what becomes of them.

    Attributes:
        count: Of each answer, at most.
        listed: Whether they are listed below the answer, or go into JSON or a page alone.
    """

    count: int
    listed: bool


def wanted_passages(run: Run, resolved: ResolvedSettings, *, html: str | None) -> WantedPassages:
    """Returns which passages to look for.

    A pipe gets the answer alone, so nothing is looked for unless somebody asked.

    Raises:
        UsageError: a page without passages is wanted.
    """
    count = resolved.settings.answer.evidence
    if html is not None and count == 0:
        raise UsageError("--html shows the passages, and no evidence is looked for")
    asked = resolved.origins["answer.evidence"] == f"option {EVIDENCE}"
    listed = not run.output.json and (asked or run.terminal.answers_on_screen)
    looked_for = asked or listed or run.output.json or html is not None
    return WantedPassages(count=count if looked_for else 0, listed=listed)


def show_evidence(run: Run, evidence: Evidence, which: str = "", *, listed: bool = True) -> None:
    """Lists the passages: below the answer on a terminal, on stderr where stdout is a pipe.

    Args:
        run: The command.
        evidence: Of one answer.
        which: Says which answer, where there are several.
        listed: Else it is only said when nothing stands out.
    """
    if not evidence.stands_out:
        run.reporter.gap()
        run.reporter.warn(
            "nothing_stands_out",
            which,
            "no passage stands out: the model looked at nothing in particular",
            again=True,
        )
    if not listed:
        return
    terminal = run.terminal
    width = terminal.columns if terminal.answers_on_screen else terminal.note_columns
    for line in evidence_lines(evidence, width=min(width or WIDTH, WIDTH)):
        if terminal.answers_on_screen:
            terminal.line(line)
        else:
            terminal.say(line)  # somebody asked for it, so that --quiet is not about it
    terminal.flush()


def evidence_lines(evidence: Evidence, *, width: int) -> list[str]:
    """Returns the passages, numbered, with their places and the share of attention."""
    lines = ["", HEADING]
    for number, passage in enumerate(evidence.passages, 1):
        where = " · ".join(part for part in (place_text(passage), section_text(passage)) if part)
        lines += ["", f"{number:>2}. {where}"]
        for line in quoted_lines(passage):
            indent = "    "
            lines += textwrap.wrap(
                line, max(width, 20), initial_indent=indent, subsequent_indent=indent
            )
    if coverage := coverage_text(evidence.coverage):
        lines += ["", coverage]
    return lines


def quoted_lines(passage: Passage) -> list[str]:
    """Returns a passage's text: prose as one line, whole lines that are indented as they stand."""
    if not passage.lead.strip():
        lines = textwrap.dedent(passage.lead + passage.text).split("\n")
        if any(line[:1].isspace() for line in lines):
            return [line.replace("\t", "    ") for line in lines if line.strip()]
    return [" ".join(passage.text.split())]


def place_text(passage: Passage) -> str:
    """Returns file and page, cell or line, with the end where it is another one."""
    first, last = passage.first, passage.last
    text = str(first)
    if first.page is not None:
        return text if last.page in (None, first.page) else f"{text} to p. {last.page}"
    for begin, end in ((first.cell, last.cell), (first.line, last.line)):
        if begin is not None:
            return text if end in (None, begin) else f"{text}-{end}"
    return text


def section_text(passage: Passage) -> str:
    """Returns the headings above a passage."""
    return " › ".join(" ".join(title.split()) for title in passage.first.titles)


def coverage_text(coverage: Coverage | None) -> str:
    """Returns how widely attention was spread, as a sentence; "" where it was everywhere."""
    if coverage is None or coverage.holding == coverage.total:
        return ""
    return (
        f"90 % of the attention paid to the document went to {coverage.holding:,} of "
        f"{coverage.total:,} {UNITS[coverage.unit]}."
    )


def evidence_json(evidence: Evidence) -> dict[str, object]:
    """Returns evidence as it goes into an answer's JSON."""
    coverage = evidence.coverage
    return {
        "passages": [
            {
                **_place_json(passage.first),
                "last_page": passage.last.page,
                "last_line": passage.last.line,
                "last_cell": passage.last.cell,
                "section": list(passage.first.titles),
                "text": passage.text,
                "tokens": passage.num_tokens,
                "share": round(passage.share, 4),
                "attention": round(passage.attention, 4),
            }
            for passage in evidence.passages
        ],
        "coverage": None
        if coverage is None
        else {"unit": coverage.unit, "holding": coverage.holding, "total": coverage.total},
        "stands_out": evidence.stands_out,
    }


def _place_json(place: Place) -> dict[str, object]:
    return {
        "file": place.file,
        "page": place.page,
        "page_label": place.page_label,
        "line": place.line,
        "cell": place.cell,
    }
