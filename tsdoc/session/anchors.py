"""Where a document says what a sentence says: the place that shares most of its rarer words.

A citation from here is found by comparing words, whatever the model looked at. A sentence without
one shares too little with the text: it may be a paraphrase, or made up. Headings say nothing: a
sentence that begins "In chapter 3" has found nothing when it has found that heading.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass

from tsdoc.ingest.document import Document, Place
from tsdoc.prompt.tokenmap import TokenMap

WINDOW = 48  # words that are compared at a time
STEP = 16
MIN_SHARED = 2  # different words, beyond the commonest
MIN_SHARE = 0.25  # of the sentence's weight
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+")
_SUFFIX = re.compile(r"(?<=.{4})(?:ing|ed|es|s|ly|'s|’s)$")


@dataclass(frozen=True, slots=True)
class _Window:
    """Words [first, last) of a section."""

    section: int
    first: int
    last: int


class Anchors:
    """Finds places among some sections of a document.

    Args:
        document: The document.
        map: Finds places by section and character.
        sections: Section numbers [first, last).
    """

    def __init__(self, document: Document, map: TokenMap, sections: tuple[int, int]) -> None:  # noqa: A002
        self._map = map
        self._words: dict[int, list[tuple[str, int]]] = {}
        self._line_ends: dict[int, list[int]] = {}
        self._windows: list[_Window] = []
        self._holders: dict[str, list[int]] = defaultdict(list)
        self._titles: set[str] = set()
        for number in range(*sections):
            section = document.sections[number]
            titles = {word for title in section.titles for word, _ in _words_of(title, 0)}
            self._titles |= titles
            words = _words_of(section.text, _heading_end(section.text, titles))
            self._words[number] = words
            self._line_ends[number] = [end.start() for end in re.finditer("\n", section.text)]
            for first in range(0, max(len(words) - WINDOW + STEP, min(1, len(words))), STEP):
                window = _Window(number, first, min(first + WINDOW, len(words)))
                for word in {word for word, _ in words[window.first : window.last]}:
                    self._holders[word].append(len(self._windows))
                self._windows.append(window)

    def find(self, sentence: str) -> Place | None:
        """Returns where the text is closest to `sentence`, None where nothing is close."""
        weights = self._weights(sentence)
        scores, shared = self._compare(weights)
        enough = MIN_SHARE * sum(weights.values())
        return self._best(
            {n: s for n, s in scores.items() if shared[n] >= MIN_SHARED and s >= enough}, weights
        )

    def nearest(self, text: str) -> Place | None:
        """Returns where the document is closest to `text`; None when no word is shared."""
        weights = self._weights(text)
        return self._best(self._compare(weights)[0], weights)

    def _compare(self, weights: dict[str, float]) -> tuple[dict[int, float], Counter[int]]:
        """What each window shares with a sentence: its weight, and the number of words."""
        scores: dict[int, float] = defaultdict(float)
        shared: Counter[int] = Counter()
        for word, weight in weights.items():
            for number in self._holders.get(word, ()):
                scores[number] += weight
                shared[number] += 1
        return scores, shared

    def _best(self, scores: dict[int, float], weights: dict[str, float]) -> Place | None:
        """Where the window with the highest score has its line that tells most."""
        if not scores:
            return None
        best = self._windows[min(scores, key=lambda number: (-scores[number], number))]
        return self._map.locate(best.section, self._offset(best, weights))

    def _weights(self, sentence: str) -> dict[str, float]:
        """How much each word of a sentence tells: nothing when half the windows hold it."""
        total = len(self._windows)
        weights = {}
        for word in {word for word, _ in _words_of(sentence, 0)}:
            holders = len(self._holders.get(word, ()))
            if holders == 0 and word in self._titles:
                continue
            if 2 * holders <= total or total < 4:
                weights[word] = math.log((total + 1) / (holders + 0.5))
        return weights

    def _offset(self, window: _Window, weights: dict[str, float]) -> int:
        """Character of the first word that tells something in the line that tells most."""
        ends = self._line_ends[window.section]
        lines: dict[int, dict[str, int]] = defaultdict(dict)
        for word, at in self._words[window.section][window.first : window.last]:
            if weights.get(word, 0.0) > 0:
                lines[bisect_right(ends, at)].setdefault(word, at)
        best = max(lines.values(), key=lambda line: sum(weights[word] for word in line))
        return min(best.values())


def _words_of(text: str, start: int) -> list[tuple[str, int]]:
    """The words from character `start` on, without endings, and where they begin."""
    return [(_stem(match.group()), match.start()) for match in _WORD.finditer(text, start)]


def _heading_end(text: str, titles: set[str]) -> int:
    """Where a section goes on behind the lines at its start that only repeat its titles."""
    end = 0
    while end < len(text):
        line_end = text.find("\n", end) + 1 or len(text)
        if any(word not in titles for word, _ in _words_of(text[end:line_end], 0)):
            break
        end = line_end
    return end


def _stem(word: str) -> str:
    return _SUFFIX.sub("", word.lower())
