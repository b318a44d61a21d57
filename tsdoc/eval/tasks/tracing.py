"""RULER's variable tracking, common words and frequent words (arXiv 2404.06654, section 3)."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence

from tsdoc.eval.haystack import Draft, Needle, Question
from tsdoc.eval.tasks.request import Request
from tsdoc.eval.words import ADJECTIVES, NOUNS, make_number, make_word

NUM_HOPS = 4
NUM_COMMON = 10
COMMON_TIMES = 30
UNCOMMON_TIMES = 3
NUM_FREQUENT = 3
ZETA_ALPHA = 2.0
NUM_CODED = 2000
DOTS = "…"
_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"


def make_tracking(request: Request) -> Draft:
    """Chains of assignments: which variables hold a value, directly or through others?"""
    rng = request.rng
    taken: set[str] = set()
    needles: list[Needle] = []
    questions = []
    for _ in range(request.num_questions):
        names = [_variable(rng, taken) for _ in range(NUM_HOPS + 1)]
        value = make_number(rng, 5)
        depths = sorted(rng.random() for _ in names)
        held = [value, *(f"VAR {name}" for name in names)]
        needles += [
            Needle(text=f"VAR {name} = {source}\n", depth=depth)
            for name, source, depth in zip(names, held, depths, strict=False)
        ]
        text = (
            f"Which variables hold the value {value}, assigned directly or through other "
            f"variables? There are {len(names)}. Answer with their names alone, separated by "
            "spaces."
        )
        questions.append(
            Question(text=text, answers=tuple(names), metric="all", depth=None, max_new_tokens=48)
        )
    return Draft(
        lead="The following text contains assignments of variables, which have to be followed.\n\n",
        background=request.background(),
        needles=needles,
        ask=lambda taken_pieces: questions,
    )


def make_common_words(request: Request) -> Draft:
    """A list in which ten words stand 30 times each and all others three times."""
    rng = request.rng
    pairs = [f"{a}{b}" for a in ADJECTIVES for b in NOUNS]
    rng.shuffle(pairs)
    common = rng.sample(NOUNS, NUM_COMMON)
    needles = [
        Needle(text=f"{word}\n", depth=rng.random()) for word in common for _ in range(COMMON_TIMES)
    ]
    question = Question(
        text=f"What are the {NUM_COMMON} words that stand most often in the list? Answer with the "
        "words alone, separated by spaces.",
        answers=tuple(common),
        metric="all",
        depth=None,
        max_new_tokens=80,
    )
    return Draft(
        lead="A list of words, one on each line. Some stand in it much more often than others.\n\n",
        background=_uncommon(rng, iter(pairs)),
        needles=needles,
        ask=lambda taken: [question],
    )


def make_frequent_words(request: Request) -> Draft:
    """Invented words drawn from a Zeta distribution; the first rank is dots."""
    rng = request.rng
    words = list(dict.fromkeys(make_word(rng) for _ in range(NUM_CODED)))
    ranks = [DOTS, *words]
    weights = [rank**-ZETA_ALPHA for rank in range(1, len(ranks) + 1)]
    cumulative = list(itertools.accumulate(weights))
    stream = (f"{rng.choices(ranks, cum_weights=cumulative)[0]} " for _ in itertools.count())

    def ask(taken: Sequence[str]) -> list[Question]:
        counts = Counter(piece.strip() for piece in taken)
        counts.pop(DOTS, None)
        most = [word for word, _ in counts.most_common(NUM_FREQUENT)] or words[:NUM_FREQUENT]
        return [
            Question(
                text=f"Leaving out the dots, which {NUM_FREQUENT} words stand most often in the "
                "coded text? Answer with the words alone, separated by spaces.",
                answers=tuple(most),
                metric="all",
                depth=None,
                max_new_tokens=50,
            )
        ]

    lead = "A text in which every word is written in code. How often each stands in it matters.\n\n"
    return Draft(lead=lead, background=stream, needles=(), ask=ask)


def _uncommon(rng: random.Random, words: Iterator[str]) -> Iterator[str]:
    """Three of each word, shuffled within stretches of 300 words."""
    while stretch := list(itertools.islice(words, 300)):
        entries = stretch * UNCOMMON_TIMES
        rng.shuffle(entries)
        yield from (f"{word}\n" for word in entries)
    while True:  # longer lists go on with invented words
        entries = [make_word(rng) + make_word(rng) for _ in range(300)] * UNCOMMON_TIMES
        rng.shuffle(entries)
        yield from (f"{word}\n" for word in entries)


def _variable(rng: random.Random, taken: set[str]) -> str:
    """Returns five capital letters that are the name of no other variable."""
    while True:
        name = "".join(rng.choice(_LETTERS) for _ in range(5))
        if name not in taken:
            taken.add(name)
            return name
