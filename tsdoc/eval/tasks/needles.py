"""RULER's needle tasks: a fact is planted in a haystack and asked for.

Definitions (RULER, COLM 2024, arXiv 2404.06654, section 3): single needle; multi-key, with 3
further needles of the same kind (1), with a haystack made of nothing else (2), and the same with
UUIDs for keys and values (3); multi-value, 4 values of one key; multi-query, 4 keys in one
question.

Questions that share a haystack ask for different kinds of facts, so that a needle has exactly the
look-alikes that its task defines; the tasks whose haystack is all needles ask for several of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tsdoc.eval.haystack import Draft, Needle, Question, spread
from tsdoc.eval.tasks.request import Request
from tsdoc.eval.words import make_name, make_number, make_uuid

LOOK_ALIKES = 4  # keys of a kind, values of a key, keys of a question
VALUE_DIGITS = 7


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fact: what it is called, and what has it."""

    fact: str
    owner: str

    def statement(self, key: str, value: str) -> str:
        """Returns the needle."""
        return f"The {self.fact} of the {self.owner} {key} is {value}. "

    def question(self, keys: list[str], *, plural: bool = False) -> str:
        """Returns the question for one key or several."""
        if plural:
            return (
                f"What are all the {self.fact}s of the {self.owner} {keys[0]} that the text "
                "mentions? Answer with the numbers alone, separated by commas."
            )
        if len(keys) > 1:
            names = f"{', '.join(keys[:-1])} and {keys[-1]}"
            return (
                f"What are the {self.fact}s of the {self.owner}s {names}? Answer with the numbers "
                "alone, separated by commas, in this order."
            )
        return f"What is the {self.fact} of the {self.owner} {keys[0]}? Answer with it alone."


KINDS = tuple(
    Kind(fact, owner)
    for fact, owner in (
        ("locker code", "office"), ("hull number", "ship"), ("catalogue number", "star"),
        ("telephone number", "bakery"), ("account number", "customer"), ("ticket number", "train"),
        ("serial number", "clock"), ("library mark", "manuscript"), ("licence number", "pilot"),
        ("registration number", "horse"), ("case number", "trial"), ("stock number", "lamp"),
        ("invoice number", "printer"), ("grave number", "soldier"), ("vote count", "candidate"),
        ("mileage", "lorry"), ("prize number", "raffle"), ("file number", "patient"),
        ("policy number", "farm"), ("patent number", "engine"), ("plot number", "garden"),
        ("batch number", "medicine"), ("member number", "club"), ("order number", "piano"),
    )
)  # fmt: skip


def make_single(request: Request) -> Draft:
    """One needle per question, each of a kind of its own."""
    return _planted(request, keys_per_kind=1, make_value=_number)


def make_single_uuid(request: Request) -> Draft:
    """One needle per question with a UUID for its value."""
    return _planted(request, keys_per_kind=1, make_value=make_uuid, max_new_tokens=128)


def make_multikey(request: Request) -> Draft:
    """Four needles of a kind; up to four questions per kind."""
    return _planted(request, keys_per_kind=LOOK_ALIKES, make_value=_number)


def make_multikey_lines(request: Request) -> Draft:
    """A haystack of needles of one kind: names and numbers."""
    return _all_needles(request, make_name, _number, max_new_tokens=48)


def make_multikey_uuids(request: Request) -> Draft:
    """A haystack of needles of one kind: UUIDs for keys and values."""

    def make_key(rng: random.Random, taken: set[str]) -> str:
        return make_uuid(rng)

    return _all_needles(request, make_key, make_uuid, max_new_tokens=128)


def make_multivalue(request: Request) -> Draft:
    """Four values of one key per question."""
    rng, names = request.rng, set[str]()
    needles: list[Needle] = []
    questions = []
    for kind in _kinds(rng, request.num_questions):
        key = make_name(rng, names)
        values = [_number(rng) for _ in range(LOOK_ALIKES)]
        depths = spread(rng, LOOK_ALIKES)
        needles += _needles(kind, [key] * LOOK_ALIKES, values, depths)
        questions.append(_question(kind.question([key], plural=True), values, depth=None, room=64))
    return _draft(request.background(), needles, questions)


def make_multiquery(request: Request) -> Draft:
    """Four keys of a kind, all in one question."""
    rng, names = request.rng, set[str]()
    needles: list[Needle] = []
    questions = []
    for kind in _kinds(rng, request.num_questions):
        keys = [make_name(rng, names) for _ in range(LOOK_ALIKES)]
        values = [_number(rng) for _ in keys]
        needles += _needles(kind, keys, values, spread(rng, LOOK_ALIKES))
        questions.append(_question(kind.question(keys), values, depth=None, room=64))
    return _draft(request.background(), needles, questions)


def _planted(
    request: Request,
    *,
    keys_per_kind: int,
    make_value: Callable[[random.Random], str],
    max_new_tokens: int = 48,
) -> Draft:
    rng, names = request.rng, set[str]()
    count = request.num_questions
    num_kinds = -(-count // keys_per_kind)
    depths = iter(spread(rng, num_kinds * keys_per_kind))
    needles: list[Needle] = []
    asked: list[Question] = []
    for kind in _kinds(rng, num_kinds):
        for _ in range(keys_per_kind):
            key, value, depth = make_name(rng, names), make_value(rng), next(depths)
            needles += _needles(kind, [key], [value], [depth])
            text = kind.question([key])
            asked.append(_question(text, [value], depth=depth, room=max_new_tokens))
    return _draft(request.background(), needles, rng.sample(asked, count))


def _all_needles(
    request: Request,
    make_key: Callable[[random.Random, set[str]], str],
    make_value: Callable[[random.Random], str],
    *,
    max_new_tokens: int,
) -> Draft:
    rng, taken = request.rng, set[str]()
    kind = rng.choice(KINDS)
    needles: list[Needle] = []
    questions = []
    for depth in spread(rng, request.num_questions):
        key, value = make_key(rng, taken), make_value(rng)
        needles += _needles(kind, [key], [value], [depth])
        text = kind.question([key])
        questions.append(_question(text, [value], depth=depth, room=max_new_tokens))
    others = (
        kind.statement(make_key(rng, taken), make_value(rng)) + "\n" for _ in itertools.count()
    )
    return _draft(others, needles, questions)


def _kinds(rng: random.Random, count: int) -> list[Kind]:
    """Returns `count` kinds, different ones while there are enough."""
    rounds = -(-count // len(KINDS))
    return [kind for _ in range(rounds) for kind in rng.sample(KINDS, len(KINDS))][:count]


def _needles(
    kind: Kind, keys: list[str], values: list[str], depths: list[float]
) -> Iterator[Needle]:
    for key, value, depth in zip(keys, values, depths, strict=True):
        yield Needle(text=f"{kind.statement(key, value)}\n", depth=depth)


def _question(text: str, answers: list[str], *, depth: float | None, room: int) -> Question:
    return Question(
        text=text, answers=tuple(answers), metric="all", depth=depth, max_new_tokens=room
    )


def _draft(background: Iterator[str], needles: list[Needle], questions: list[Question]) -> Draft:
    return Draft(
        lead="Somewhere in the following text facts are mentioned that will be asked for.\n\n",
        background=background,
        needles=needles,
        ask=lambda taken: questions,
    )


def _number(rng: random.Random) -> str:
    return make_number(rng, VALUE_DIGITS)
