"""Reading again: what a question looks at is repeated right before it.

At length, a sparse prefill has written K and V of a passage that knew little of what stands far
away, and a selection shared by all heads leaves some layers without it. So the question first runs
by itself, up to the layers that tell what it looks at; the stretches of the document that draw most
of its votes (`tsdoc/engine/evidence.py`), and a few that repeat the question's own words, are then
read once more between the document and the question, in document order, with fresh K and V and
inside the local window. Nothing of this touches what a prefill writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tsdoc.engine.evidence import Copy, Neutral, document_votes, gain
from tsdoc.engine.forward import Runner
from tsdoc.kernels.interface import DeviceCache
from tsdoc.kernels.selection import chunk_range
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.prompt.tokenizer import Ids

OPENING = "\nPassages of the documents, repeated:"
BETWEEN = "\n- "
STRETCH = 64  # tokens
WINDOW = 16  # tokens over which votes are summed, twice, to find where they are dense
LEAST = 0.3  # of the densest place: what is looked at less only distracts
WORDS = 4  # consecutive tokens of the question that are looked for
WORDS_TURN = 4  # every so many stretches, one is chosen for its words
QUOTED = 133  # density where twelve tokens stand that the question repeats and no other place has


@dataclass(frozen=True, slots=True, kw_only=True)
class Reread:
    """What may be read again before a question.

    Attributes:
        ids: Token ids of the prompt.
        neutral: To tell what this question looks at from what every question does.
        opening: Token ids before what is repeated.
        between: Token ids before every stretch.
        num_tokens: Tokens repeated at most, in all.
    """

    ids: Ids
    neutral: Neutral
    opening: Sequence[int]
    between: Sequence[int]
    num_tokens: int

    @property
    def room(self) -> int:
        """Tokens that it adds to a question at most."""
        count = max(2, self.num_tokens // STRETCH)  # a quoted place takes two
        return len(self.opening) + count * (STRETCH + len(self.between))

    def find(
        self,
        runner: Runner,
        cache: DeviceCache,
        question: Sequence[int],
        start: int,
        *,
        question_chunk_size: int,
        asked_from: int = 0,
    ) -> list[tuple[int, int]]:
        """Finds the stretches that a question at `start` looks at, in document order.

        None where everything is attended anyway. K and V behind `start` are overwritten.

        Raises:
            CorruptPageError: a page does not match its checksum.
        """
        around = chunk_range(start, start + len(question), runner.selection)
        if around.num_candidates <= runner.selection.top_k:
            return []
        first, last = self.neutral.document
        expected = self.neutral.votes(runner, cache, start, question_chunk_size=question_chunk_size)
        asked = document_votes(
            runner, cache, question, start, (first, last),
            question_chunk_size=question_chunk_size, asked_from=asked_from,
        )  # fmt: skip
        runner.load(cache, start)
        words = repeated_words(self.ids[first:last], np.asarray(question[asked_from:]))
        found = choose_stretches(
            gain(asked, expected), torch.from_numpy(words), self.num_tokens // STRETCH
        )
        return [(first + low, first + high) for low, high in found]

    def repeat(
        self, stretches: Sequence[tuple[int, int]], start: int
    ) -> tuple[list[int], list[Copy]]:
        """Token ids to be read from position `start` on, and which of them are copies."""
        ids: list[int] = []
        copies = []
        for first, last in stretches:
            ids += self.between if ids else [*self.opening, *self.between]
            copies.append(Copy(first, last, start + len(ids)))
            ids += self.ids[first:last].tolist()
        return ids, copies


def make_reread(
    template: ChatTemplate, ids: Ids, neutral: Neutral, num_tokens: int
) -> Reread | None:
    """What may be read again of the prompt `ids`; None where nothing is to be."""
    if num_tokens < STRETCH:
        return None
    opening, between = (
        found.tolist() for found, _ in template.tokenizer.encode_many([OPENING, BETWEEN])
    )
    return Reread(ids=ids, neutral=neutral, opening=opening, between=between, num_tokens=num_tokens)


def choose_stretches(
    looked: torch.Tensor, words: torch.Tensor, count: int
) -> list[tuple[int, int]]:
    """Returns up to `count` ranges of STRETCH tokens, those that touch as one, ascending.

    Where the question quotes the document at length, these places alone.

    Args:
        looked: [num_positions], ≥ 0: how much the question looks at each.
        words: Same, on the CPU: how rare words of the question stand there.
        count: Stretches at most.
    """
    size = looked.shape[0]
    if size == 0:
        return []
    by_look, by_words = _density(looked), _density(words)
    worth = LEAST * float(by_look.max())
    is_quoted = float(by_words.max()) >= QUOTED
    chosen = np.zeros(size, dtype=np.bool_)
    width = STRETCH
    if is_quoted:  # an answer may be as long as what was quoted
        width, count = 2 * STRETCH, max(1, count // 2)
    for number in range(count):
        dense, least, before = by_look, worth, width // 2
        if is_quoted or (number % WORDS_TURN == 0 and float(by_words.max()) > 0):
            # What is asked for comes behind the words.
            dense, least, before = by_words, QUOTED - 1 if is_quoted else 0.0, STRETCH // 4
        peak = int(dense.argmax())
        if not float(dense[peak]) > least:
            continue
        first = max(0, min(peak - before, size - width))
        chosen[first : first + width] = True
        near = slice(max(0, first - WINDOW), first + width + WINDOW)  # what the density reaches
        by_look[near] = by_words[near] = 0
    edges = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def repeated_words(ids: Ids, question: Ids) -> npt.NDArray[np.float32]:
    """Where the question's own words stand, and how rare they are, [num_positions].

    A run of WORDS tokens that is in the question too counts 1/n² at each of its n places.
    """
    scores = np.zeros(ids.size, dtype=np.float32)
    if min(ids.size, question.size) < WORDS:
        return scores
    own = _runs(ids)
    at = np.flatnonzero(np.isin(own, _runs(question)))
    _, kinds, counts = np.unique(own[at], return_inverse=True, return_counts=True)
    scores[at] = 1.0 / counts[kinds] ** 2
    return scores


def _runs(tokens: Ids) -> npt.NDArray[np.int64]:
    """A hash of each run of WORDS tokens."""
    hashed = np.zeros(tokens.size - WORDS + 1, dtype=np.int64)
    for at in range(WORDS):
        hashed = hashed * 1_000_003 + tokens[at : tokens.size - WORDS + 1 + at]
    return hashed


def _density(scores: torch.Tensor) -> torch.Tensor:
    """Sums around each position, weights falling to both sides: highest in the middle of a peak."""
    size, half = scores.shape[0], WINDOW // 2
    at = torch.arange(size, device=scores.device)
    low, high = (at - half).clamp_min(0), (at + half + 1).clamp_max(size)
    dense = scores.double()
    for _ in range(2):
        totals = F.pad(dense.cumsum(0), (1, 0))
        dense = totals[high] - totals[low]
    return dense
