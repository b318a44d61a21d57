"""InfiniteBench's synthetic tasks (ACL 2024, arXiv 2402.13718, section 3).

Pass key and number string hide one number in filler; key-value retrieval asks for values in one
long JSON object; math find asks for the largest and smallest of a long list of integers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from tsdoc.eval.haystack import Draft, Needle, Question, spread
from tsdoc.eval.tasks.request import Request
from tsdoc.eval.words import make_number, make_uuid

PASSKEY_DIGITS = 5
STRING_DIGITS = 10


def make_passkey(request: Request) -> Draft:
    """A five-digit pass key in filler."""
    return _hidden(request, "pass key", make_number(request.rng, PASSKEY_DIGITS))


def make_number_string(request: Request) -> Draft:
    """A ten-digit sequence with successive repetitions in filler."""
    rng = request.rng
    runs: list[str] = []
    while sum(map(len, runs)) < STRING_DIGITS:
        digit = rng.choice([d for d in "123456789" if not runs or d != runs[-1][0]])
        runs.append(digit * rng.randint(1, 4))
    return _hidden(request, "sequence of digits", "".join(runs)[:STRING_DIGITS])


def make_kv_retrieval(request: Request) -> Draft:
    """A JSON object of UUIDs; the value of a key is asked for."""
    rng = request.rng
    needles, questions = [], []
    for depth in spread(rng, request.num_questions):
        key, value = make_uuid(rng), make_uuid(rng)
        needles.append(Needle(text=_pair(key, value), depth=depth))
        questions.append(
            Question(
                text=f'Which value has the key "{key}" in the JSON object? Answer with it alone.',
                answers=(value,),
                metric="word",
                depth=depth,
                max_new_tokens=128,
            )
        )
    return Draft(
        lead="A JSON object, of which values will be asked for:\n\n{",
        background=(_pair(make_uuid(rng), make_uuid(rng)) for _ in itertools.count()),
        needles=needles,
        ask=lambda taken: questions,
    )


def make_math_find(request: Request) -> Draft:
    """A list of integers; an extreme or one next to it is asked for."""
    rng = request.rng
    wanted = rng.sample(sorted(_STATISTICS), min(request.num_questions, len(_STATISTICS)))

    def ask(taken: Sequence[str]) -> list[Question]:
        numbers = [int(piece.rstrip(", ")) for piece in taken] or [0, 1, 2]
        return [
            Question(
                text=f"What is the {name} number in the list? Answer with the number alone.",
                answers=(str(_statistic(numbers, name)),),
                metric="first_number",
                depth=None,
                max_new_tokens=12,
            )
            for name in wanted
        ]

    return Draft(lead="A list of numbers: ", background=_integers(rng), needles=(), ask=ask)


_STATISTICS = {
    "largest": -1, "second largest": -2, "third largest": -3,
    "smallest": 0, "second smallest": 1, "third smallest": 2,
}  # fmt: skip


def _statistic(numbers: Sequence[int], name: str) -> int:
    """The number at a place of the sorted list of different numbers."""
    return sorted(set(numbers))[_STATISTICS[name]]


def _integers(rng: random.Random) -> Iterator[str]:
    return (f"{rng.randrange(1, 1_000_000)}, " for _ in itertools.count())


def _hidden(request: Request, what: str, value: str) -> Draft:
    depth = request.rng.random()
    question = Question(
        text=f"What is the {what}? Answer with the digits alone.",
        answers=(value,),
        metric="first_number",
        depth=depth,
        max_new_tokens=16,
    )
    text = f"Remember this: the {what} is {value}. Once more, {value} is the {what}.\n"
    return Draft(
        lead=f"A {what} is hidden in much text that does not matter.\n\n",
        background=request.background(),
        needles=[Needle(text=text, depth=depth)],
        ask=lambda taken: [question],
    )


def _pair(key: str, value: str) -> str:
    return f'"{key}": "{value}",\n'
