"""Text that is generated, sentence by sentence, and when it begins to repeat itself.

Small models that run out of things to say fall into loops. The rule here is the same for every
model: a summary ends before the first sentence with eight words in a row that it has said before.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

RUN = 8  # words in a row that count as a repetition
ABBREVIATION = 8  # characters are looked at for one
MAX_WORDS = 150  # of one sentence; more is a list without end

# Scripts without spaces between words count letter by letter.
_LETTERS = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(f"[{_LETTERS}]|[^\\W{_LETTERS}]+")
_END = re.compile(r"""[.!?…]["'”’)\]*_]*(?=\s)|[。！？]["”」』）]*|\n""")
_NO_END = re.compile(
    r"(?:^|[\s(\[\"'“‘])(?:Mr|Mrs|Ms|Dr|St|Prof|Capt|Col|Gen|Lt|Rev|Sr|Jr|vs|cf|ca|No|Fig|pp?"
    r"|e\.g|i\.e|\d+|[A-Z])\.$"
)


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case."""
    return [match.group().lower() for match in _WORD.finditer(text)]


def runs_of(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields every run of RUN words."""
    for start in range(len(words) - RUN + 1):
        yield tuple(words[start : start + RUN])


class Sentences:
    """Takes an answer as it comes and passes on its sentences.

    Args:
        on_sentence: Receives each sentence, without white space around it, when it is complete.

    Attributes:
        said: The sentences passed on.
        looped: Whether a repetition was met; nothing is passed on from then on.
    """

    def __init__(self, on_sentence: Callable[[str], None]) -> None:
        self.said: list[str] = []
        self.looped = False
        self._on_sentence = on_sentence
        self._words: list[str] = []
        self._runs: set[tuple[str, ...]] = set()
        self._rest = ""

    def add(self, text: str) -> None:
        """Takes the next piece."""
        self._rest += text
        while not self.looped and (end := sentence_end(self._rest)) is not None:
            sentence, self._rest = self._rest[:end].strip(), self._rest[end:]
            self._pass_on(sentence)
        if not self.looped and self._repeats(words_of(self._rest)[:-1]):
            self.looped = True

    def finish(self, *, cut: bool) -> None:
        """The answer is over; what is left of a cut one counts only when there is nothing else."""
        rest, self._rest = self._rest.strip(), ""
        if rest and not self.looped and not (cut and self.said):
            self._pass_on(f"{rest} …" if cut else rest)

    def _pass_on(self, sentence: str) -> None:
        words = words_of(sentence)
        if self._repeats(words):
            self.looped = True
        elif words:
            self._words += words
            self._runs.update(runs_of(self._words[-len(words) - RUN + 1 :]))
            self.said.append(sentence)
            self._on_sentence(sentence)

    def _repeats(self, words: list[str]) -> bool:
        """Whether `words`, said next, would bring a run for the second time."""
        if len(words) > MAX_WORDS:
            return True
        own = list(runs_of([*self._words[-RUN + 1 :], *words]))
        return len(set(own)) < len(own) or not self._runs.isdisjoint(own)


class Repetitions:
    """Keeps runs of words from standing in a text of several summaries more than twice."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, ...]] = Counter()

    def admit(self, sentences: Sequence[str]) -> list[int]:
        """Returns which sentences of the next summary say nothing for the third time."""
        admitted: list[int] = []
        words: list[str] = []
        for number, sentence in enumerate(sentences):
            own = words_of(sentence)
            runs = list(runs_of([*words[-RUN + 1 :], *own]))
            if any(self._counts[run] >= 2 for run in runs):
                continue
            self._counts.update(runs)
            words += own
            admitted.append(number)
        return admitted


def sentence_end(text: str) -> int | None:
    """Returns where the first sentence of `text` ends, None while that is not certain."""
    for match in _END.finditer(text):
        before = text[max(match.end() - ABBREVIATION, 0) : match.end()]
        if match.group() == "\n" or not _NO_END.search(before):
            return match.end()
    return None
