"""Cuts the places where evidence is densest out of a document: whole sentences, best first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tsdoc.evidence.sentences import lines, paragraph_around, sentences
from tsdoc.prompt.tokenmap import Span, TokenMap

MAX_TOKENS = 100
WINDOW = 16  # tokens over which evidence is averaged to find where it is dense
REACH = 4000  # characters around a dense place in which its paragraph is looked for
GROWTH = 0.5  # a neighbouring sentence joins when its peak is at least so high

Scores = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A stretch of the document.

    Attributes:
        span: Its characters.
        start: Prompt position of its first token.
        end: Position after its last token.
        peak: Most evidence in WINDOW consecutive tokens of it. What a long sentence says beside
            that does not count against it.
    """

    span: Span
    start: int
    end: int
    peak: float


def cut_passages(scores: Scores, first: int, token_map: TokenMap, *, count: int) -> list[Cut]:
    """Returns up to `count` passages that do not overlap, the highest peak first.

    Args:
        scores: Evidence of each token from prompt position `first` on; not negative.
        first: Position of scores[0], not before the first section.
        token_map: Of the prompt.
        count: Passages at most.
    """
    content = _only_content(scores, first, token_map)
    totals = np.concatenate([[0.0], np.cumsum(content, dtype=np.float64)])
    dense = _windowed(totals)
    found: list[Cut] = []
    # Windows reach over the ends of sentences, passages do not: a few more are cut and then ranked.
    while len(found) < 2 * count + 2 and dense.size:
        peak = int(np.argmax(dense))
        if dense[peak] <= 0:
            break
        passage = _passage_at(peak + first, totals, first, token_map, found)
        dense[peak] = 0
        if passage is not None:
            dense[max(passage.start - first, 0) : max(passage.end - first, 0)] = 0
            found.append(passage)
    return sorted(found, key=lambda p: -p.peak)[:count]


def _only_content(scores: Scores, first: int, token_map: TokenMap) -> Scores:
    """`scores` without those of delimiters, which spell nothing of the document."""
    content = np.zeros_like(scores)
    for number, section in enumerate(token_map.document.sections):
        if section.text:
            span = Span(section=number, start=0, end=len(section.text))
            start, end = (max(at - first, 0) for at in token_map.tokens(span))
            content[start:end] = scores[start:end]
    return content


def _windowed(totals: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Evidence in the window around each token."""
    size = totals.size - 1
    at = np.arange(size)
    low, high = np.maximum(at - WINDOW // 2, 0), np.minimum(at + (WINDOW + 1) // 2, size)
    windowed: npt.NDArray[np.float64] = totals[high] - totals[low]
    return windowed


def _passage_at(
    token: int, totals: npt.NDArray[Any], first: int, token_map: TokenMap, found: list[Cut]
) -> Cut | None:
    """The sentences around a token that hold most; None where all is found, or no text."""
    spelled = token_map.spans(token, token + 1)
    if not spelled:
        return None
    section, offset = spelled[0].section, spelled[0].start
    text = token_map.document.sections[section].text
    start, end = paragraph_around(text, offset, reach=REACH)
    whole = [Span(section=section, start=a, end=b) for a, b in sentences(text, start, end)]
    parts = [part for sentence in whole for part in _short_parts(sentence, token_map)]
    pieces = [_cut(part, totals, first, token_map) for part in parts]
    free = [not any(f.start < p.end and p.start < f.end for f in found) for p in pieces]
    # The sentence that holds most of the window around the token.
    low, high = token - WINDOW // 2, token + (WINDOW + 1) // 2
    shares = [
        _evidence(max(p.start, low), min(p.end, high), totals, first) if is_free else 0.0
        for p, is_free in zip(pieces, free, strict=True)
    ]
    if max(shares, default=0.0) <= 0:
        return None
    return _grown(pieces, free, int(np.argmax(shares)), totals, first, token_map)


def _short_parts(span: Span, token_map: TokenMap) -> list[Span]:
    """`span`, or its lines, or pieces of these, so that none has more than MAX_TOKENS tokens."""
    start, end = token_map.tokens(span)
    if end - start <= MAX_TOKENS:
        return [span]
    text = token_map.document.sections[span.section].text
    own_lines = lines(text, span.start, span.end)
    if len(own_lines) > 1:
        groups: list[Span] = []
        for low, high in own_lines:
            line = Span(section=span.section, start=low, end=high)
            wider = Span(section=span.section, start=groups[-1].start, end=high) if groups else line
            if groups and _num_tokens(wider, token_map) <= MAX_TOKENS:
                groups[-1] = wider
            else:
                groups.append(line)
        return [part for group in groups for part in _short_parts(group, token_map)]
    return [
        piece
        for low in range(start, end, MAX_TOKENS - 4)
        for piece in token_map.spans(low, min(low + MAX_TOKENS - 4, end))
    ]


def _num_tokens(span: Span, token_map: TokenMap) -> int:
    start, end = token_map.tokens(span)
    return end - start


def _grown(
    pieces: list[Cut],
    free: list[bool],
    best: int,
    totals: npt.NDArray[Any],
    first: int,
    token_map: TokenMap,
) -> Cut:
    """The best sentence with its free neighbours, as far as these are dense and there is room."""
    low = high = best
    passage = pieces[best]
    while True:
        options = [i for i in (low - 1, high + 1) if 0 <= i < len(pieces) and free[i]]
        options = [i for i in options if pieces[i].peak >= GROWTH * pieces[best].peak]
        if not options:
            return passage
        chosen = max(options, key=lambda i: pieces[i].peak)
        low, high = min(low, chosen), max(high, chosen)
        span = Span(
            section=passage.span.section, start=pieces[low].span.start, end=pieces[high].span.end
        )
        wider = _cut(span, totals, first, token_map)
        if wider.end - wider.start > MAX_TOKENS:
            return passage
        passage = wider


def _evidence(start: int, end: int, totals: npt.NDArray[Any], first: int) -> float:
    """Evidence of the tokens [start, end)."""
    low, high = (min(max(at - first, 0), totals.size - 1) for at in (start, end))
    return float(totals[high] - totals[low]) if low < high else 0.0


def _cut(span: Span, totals: npt.NDArray[Any], first: int, token_map: TokenMap) -> Cut:
    start, end = token_map.tokens(span)
    peak = _windowed(totals[max(start - first, 0) : max(end - first, 0) + 1]).max()
    return Cut(span=span, start=start, end=end, peak=float(peak))
