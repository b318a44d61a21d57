"""From evidence and attention per token to what is reported of an answer."""

from __future__ import annotations

import numpy as np

from tsdoc.evidence.coverage import measure_coverage
from tsdoc.evidence.passages import Cut, Scores, cut_passages
from tsdoc.evidence.results import Evidence, Passage
from tsdoc.prompt.tokenmap import TokenMap

STRIP_PARTS = 400
STANDS_OUT = 0.05  # nats in one passage; questions about nothing in particular stay below


def find_evidence(
    evidence: Scores, attention: Scores, first: int, token_map: TokenMap, *, count: int
) -> Evidence:
    """Reports the `count` passages that draw most, and how widely attention was spread.

    Args:
        evidence: Of each token from prompt position `first` on, in nats; not negative.
        attention: Same, the share of attention paid.
        first: Position of the first.
        token_map: Of the prompt.
        count: Passages at most.
    """
    cuts = cut_passages(evidence, first, token_map, count=count)
    most = max((evidence[cut.start - first : cut.end - first].sum() for cut in cuts), default=0.0)
    return Evidence(
        passages=tuple(_passage(cut, evidence, attention, first, token_map) for cut in cuts),
        coverage=measure_coverage(attention, first, token_map),
        stands_out=float(most) >= STANDS_OUT,
        strip=_strip(evidence),
    )


def _passage(
    cut: Cut, evidence: Scores, attention: Scores, first: int, token_map: TokenMap
) -> Passage:
    span = cut.span
    own = slice(cut.start - first, cut.end - first)
    text = token_map.document.sections[span.section].text
    return Passage(
        text=text[span.start : span.end],
        lead=text[text.rfind("\n", 0, span.start) + 1 : span.start],
        first=token_map.locate(span.section, span.start),
        last=token_map.locate(span.section, span.end - 1),
        section=span.section,
        start=span.start,
        end=span.end,
        num_tokens=cut.end - cut.start,
        position=((cut.start + cut.end) / 2 - first) / evidence.size,
        share=_share(evidence, own),
        attention=_share(attention, own),
    )


def _share(values: Scores, own: slice) -> float:
    total = float(values.sum())
    return float(values[own].sum()) / total if total > 0 else 0.0


def _strip(evidence: Scores) -> tuple[float, ...]:
    if evidence.size == 0:
        return ()
    parts = np.array_split(evidence, min(STRIP_PARTS, evidence.size))
    means = np.array([part.mean() for part in parts])
    return tuple((means / (means.max() or 1.0)).round(4).tolist())
