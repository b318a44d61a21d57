"""Made-up facts, their questions and answers, and books with such facts planted in them.

Names, places and values are drawn by a seed; several facts of a book are of a kind, so that
finding one means telling it from its likes.
"""

from __future__ import annotations

import random
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


def _words(text: str) -> list[str]:
    return text.split(",")


FIRST = _words(
    "Ambrose,Beatrix,Casimir,Delphine,Edgar,Florinda,Gideon,Hester,Ignatius,Josephine,Killian,"
    "Lavinia,Mortimer,Nerissa,Octavius,Philippa,Quentin,Rosamund,Silas,Theodora"
)
LAST = _words(
    "Aldwinkle,Brackenbury,Crowhurst,Dunmore,Eastlake,Fenwick,Garrowby,Hollis,Ingleby,Jessamine,"
    "Kestrel,Lathbury,Merriday,Nettlefold,Oxenham,Pemberly,Quillfeather,Ravenscar,Sallow,Tredgold"
)
PLACES = _words(
    "Kelmouth,Dunsferry,Marlowick,Oakhampton,Perrin,Saltmere,Thornaby,Velmont,Westerby,Yarrowdale,"
    "Bexcombe,Corriston,Eldergate,Foxhaven,Grimsdale,Harrowfen,Ilmersley,Jorvale,Lindenholt,Norwold"
)
COLOURS = _words("crimson,turquoise,orange,violet,yellow,green,silver,purple")
OBJECTS = _words(
    "a brass kettle,a cracked teapot,a stone lion,a birdcage,a rain barrel,a church bell,"
    "a wheelbarrow,a stuffed owl"
)
ANIMALS = _words("goat,tortoise,peacock,ferret,donkey,heron,otter,badger")
DRINKS = _words("barley water,cherry brandy,goat's milk,peppermint tea,cold coffee,ginger beer")
PETS = _words("Admiral,Biscuit,Clementine,Domino,Figaro,Marmalade,Pickle,Truffle")
THINGS = _words("butterflies,thimbles,sea shells,clay pipes,theatre tickets,walking sticks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A sentence to plant, a question about it, and the pattern of right answers."""

    sentence: str
    question: str
    pattern: str


@dataclass(frozen=True, slots=True)
class _Kind:
    sentence: str
    question: str
    values: Sequence[str] | range


KINDS = (
    _Kind(
        "The lighthouse keeper of {place} painted his front door {value}.",
        "What colour did the lighthouse keeper of {place} paint his front door?",
        COLOURS,
    ),
    _Kind(
        "{name} owed the baker of {place} exactly {value} shillings.",
        "How many shillings did {name} owe the baker of {place}?",
        range(23, 98),
    ),
    _Kind(
        "The stone bridge at {place} was finished in the year {value}.",
        "In which year was the stone bridge at {place} finished?",
        range(1611, 1799),
    ),
    _Kind(
        "{name} always hid the spare key under {value}.",
        "Under what did {name} always hide the spare key?",
        OBJECTS,
    ),
    _Kind(
        "The parrot of {name} was called {value}.",
        "What was the parrot of {name} called?",
        PETS,
    ),
    _Kind(
        "At the autumn fair in {place}, the first prize went to a {value}.",
        "Which animal won the first prize at the autumn fair in {place}?",
        ANIMALS,
    ),
    _Kind(
        "The doctor advised {name} to drink {value} every evening.",
        "What did the doctor advise {name} to drink every evening?",
        DRINKS,
    ),
    _Kind(
        "{name} had a cabinet of {value} which no visitor was allowed to touch.",
        "What did {name} have a cabinet of?",
        THINGS,
    ),
    _Kind(
        "There were {value} steps from the harbour of {place} up to the chapel.",
        "How many steps were there from the harbour of {place} up to the chapel?",
        range(112, 987),
    ),
    _Kind(
        "The coach to {place} was drawn by {value} horses and driven by {name}.",
        "Who drove the coach to {place}?",
        ("four", "six", "two", "eight"),
    ),
)


def make_facts(count: int, rng: random.Random) -> list[Fact]:
    """`count` facts; no two share both kind and subject."""
    names = [f"{first} {last}" for first in FIRST for last in LAST]
    rng.shuffle(names)
    places = rng.sample(PLACES, len(PLACES))
    facts = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        name, place = names[number], places[number % len(places)]
        value = str(rng.choice(kind.values))
        words = {"name": name, "place": place, "value": value}
        facts.append(
            Fact(
                sentence=kind.sentence.format(**words),
                question=kind.question.format(**words),
                pattern=_pattern(name if kind.question.startswith("Who") else value),
            )
        )
    return facts


def _pattern(value: str) -> str:
    return re.escape(value.removeprefix("a ")) + r"\b"


def is_right(answer: str, pattern: str) -> bool:
    """Whether an answer holds, as whole words, what `pattern` (a regular expression) asks for."""
    return re.search(rf"\b({pattern})", answer, re.IGNORECASE) is not None


def plant_in_text(text: str, facts: Sequence[Fact], rng: random.Random) -> str:
    """Puts facts behind sentences in the middle of paragraphs, and between paragraphs, in turn.

    Where no two paragraphs are left to stand between, a fact goes behind a sentence.
    """
    inside = [m.end() for m in re.finditer(r"[a-z]{3}[.!?](?=\s[^\n])", text)]
    between = [m.start() for m in re.finditer(r"\n\n", text)]
    cuts: dict[int, str] = {}
    for nth, fact in enumerate(facts):
        alone = [at for at in between if nth % 2 == 1 and at not in cuts]
        where = rng.choice(alone or [at for at in inside if at not in cuts])
        cuts[where] = ("\n\n" if alone else " ") + fact.sentence
    edges = [0, *sorted(cuts), len(text)]
    return "".join(cuts.get(a, "") + text[a:b] for a, b in pairwise(edges))


def plant_in_epub(
    book: Path, target: Path, member: str, facts: Sequence[Fact], rng: random.Random
) -> None:
    """Writes a copy of an EPUB whose chapter `member` has facts as paragraphs of their own."""
    with zipfile.ZipFile(book) as source, zipfile.ZipFile(target, "w") as copy:
        for info in source.infolist():
            data = source.read(info)
            if info.filename == member:
                parts = data.decode("utf-8").split("</p>")
                cuts = sorted(rng.sample(range(2, len(parts) - 1), len(facts)))
                for nth, (cut, fact) in enumerate(zip(cuts, facts, strict=True)):
                    parts.insert(cut + nth, f"\n<p>{fact.sentence}")
                data = "</p>".join(parts).encode("utf-8")
            copy.writestr(info, data)
