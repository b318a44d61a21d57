"""Haystacks: a background of an exact length in tokens with facts planted at known depths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tsdoc.errors import UsageError
from tsdoc.eval.metrics import Metric
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.prompt.tokenizer import Ids, TextTokenizer

BATCH_PIECES = 256
FULL_RATIO = 0.9  # a background that fills less than this is too short


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a haystack.

    Attributes:
        text: As a user would ask it.
        answers: What is expected; `metric` says whether all or any.
        depth: Where the answer lies: 0 is the beginning, 1 the end; None when it is everywhere.
        max_new_tokens: Room for the answer.
        classes: All classes, for the metric `class`.
        first_line: Whether only the prediction's first line is scored.
    """

    text: str
    answers: tuple[str, ...]
    metric: Metric
    depth: float | None
    max_new_tokens: int
    classes: tuple[str, ...] = ()
    first_line: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """A text to be planted at `depth` (0 to 1)."""

    text: str
    depth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A haystack before its length is known.

    Attributes:
        lead: Stands before everything.
        background: As many pieces as anybody wants; the haystack takes what fits.
        needles: Planted between the pieces; those of equal depth keep their order.
        ask: Returns the questions, given the pieces that were taken.
    """

    lead: str
    background: Iterable[str]
    needles: Sequence[Needle]
    ask: Callable[[Sequence[str]], list[Question]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Haystack:
    """One prefill and the questions that share it.

    Attributes:
        ids: int32 [num_tokens]: the template's head and the haystack.
        questions: What is asked.
        question_ids: For each question, everything from behind the haystack to the answer.
    """

    ids: Ids
    questions: tuple[Question, ...]
    question_ids: tuple[Ids, ...]


def build_haystack(
    draft: Draft, length: int | None, tokenizer: TextTokenizer, template: ChatTemplate
) -> Haystack:
    """Fills `draft` up to `length` tokens: head, haystack, longest question and answer together.

    With `length` None the whole background is taken.

    Raises:
        UsageError: the length does not hold what has to be in it, or the background ends before.
    """
    needles = sorted(draft.needles, key=lambda needle: needle.depth)
    lead, *planted = (ids for ids, _ in tokenizer.encode_many([draft.lead, *_texts(needles)]))
    fixed = template.head_ids.size + lead.size + sum(ids.size for ids in planted)
    budget = None
    if length is not None:
        # Questions may depend on the pieces taken, but hardly in length.
        room = _longest(draft.ask([]), template)
        budget = length - fixed - room
        if budget <= 0:
            raise UsageError(
                f"a length of {length:,} tokens does not hold this task's {fixed + room:,} tokens",
                hint="Choose longer --lengths or fewer --items.",
            )
    texts, pieces = _take(draft.background, budget, tokenizer)
    sizes = np.cumsum([0, *(ids.size for ids in pieces)])
    if budget is not None and sizes[-1] < FULL_RATIO * budget:
        raise UsageError(
            f"the source has {int(sizes[-1]):,} tokens, fewer than a length of {length:,} asks for",
            hint="Choose shorter --lengths or a longer --source.",
        )
    parts: list[Ids] = [template.head_ids, lead]
    at = 0
    for needle, ids in zip(needles, planted, strict=True):
        stop = int(np.searchsorted(sizes, needle.depth * sizes[-1]))
        parts += [*pieces[at:stop], ids]
        at = max(at, stop)
    parts += pieces[at:]
    questions = draft.ask(texts)
    return Haystack(
        ids=np.concatenate(parts).astype(np.int32),
        questions=tuple(questions),
        question_ids=tuple(template.question_ids(question.text) for question in questions),
    )


def spread(rng: random.Random, count: int) -> list[float]:
    """Returns `count` depths, one from each of equally many stretches, in random order."""
    depths = [(number + rng.random()) / count for number in range(count)]
    rng.shuffle(depths)
    return depths


def _texts(needles: Iterable[Needle]) -> Iterator[str]:
    return (needle.text for needle in needles)


def _longest(questions: Sequence[Question], template: ChatTemplate) -> int:
    return max(template.question_ids(q.text).size + q.max_new_tokens for q in questions)


def _take(
    background: Iterable[str], budget: int | None, tokenizer: TextTokenizer
) -> tuple[list[str], list[Ids]]:
    """Takes pieces while they fit; stops at the first that does not."""
    texts: list[str] = []
    pieces: list[Ids] = []
    total = 0
    for batch in _batches(background):
        for text, (ids, _) in zip(batch, tokenizer.encode_many(batch), strict=True):
            if budget is not None and total + ids.size > budget:
                return texts, pieces
            total += ids.size
            texts.append(text)
            pieces.append(ids)
    return texts, pieces


def _batches(pieces: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == BATCH_PIECES:
            yield batch
            batch = []
    if batch:
        yield batch
