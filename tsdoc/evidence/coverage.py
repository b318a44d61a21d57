"""How widely attention was spread over the pages, files or sections of a document."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tsdoc.evidence.results import Coverage, CoverageUnit
from tsdoc.prompt.tokenmap import Span, TokenMap

HELD = 0.9

Mass = npt.NDArray[np.float32]


def measure_coverage(attention: Mass, first: int, token_map: TokenMap) -> Coverage | None:
    """Returns how many pages, files or sections hold 90 % of the attention.

    Args:
        attention: Of each token from prompt position `first` on.
        first: Position of attention[0].
        token_map: Of the prompt.
    """
    unit, starts = _unit_starts(token_map)
    if len(starts) < 2 or attention.sum() <= 0:
        return None
    bounds = np.array(list(starts.values()))
    positions = np.arange(first, first + attention.size)
    owners = np.clip(np.searchsorted(bounds, positions, side="right") - 1, 0, None)
    parts = np.bincount(owners, weights=attention, minlength=bounds.size)
    largest = np.sort(parts)[::-1].cumsum()
    holding = int(np.searchsorted(largest, HELD * largest[-1])) + 1
    return Coverage(unit=unit, holding=holding, total=len(starts))


def _unit_starts(token_map: TokenMap) -> tuple[CoverageUnit, dict[tuple[int, int], int]]:
    """Prompt position where each unit begins, by file and number within it, ascending."""
    document = token_map.document
    paged = {section.file for section in document.sections if section.pages}
    if paged:
        mixed = any(section.file not in paged for section in document.sections)
        return ("page_or_file" if mixed else "page"), _page_starts(token_map, paged)
    whole_files = len(document.files) > 1
    starts: dict[tuple[int, int], int] = {}
    for number, section in enumerate(document.sections):
        unit = (section.file, 0 if whole_files else number)
        starts.setdefault(unit, token_map.section_range(number)[0])
    return ("file" if whole_files else "section"), starts


def _page_starts(token_map: TokenMap, paged: set[int]) -> dict[tuple[int, int], int]:
    """Where pages begin, and files that have none; `paged` are those that have some."""
    starts: dict[tuple[int, int], int] = {}
    for number, section in enumerate(token_map.document.sections):
        if section.file not in paged:
            starts.setdefault((section.file, 0), token_map.section_range(number)[0])
        for page in section.pages:
            position = token_map.section_range(number)[0]
            if section.text:
                at = min(page.start, len(section.text) - 1)
                position = token_map.tokens(Span(section=number, start=at, end=at + 1))[0]
            starts.setdefault((section.file, page.number), position)
    return starts
