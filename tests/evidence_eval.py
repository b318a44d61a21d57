"""Measures whether the passages under an answer are where its fact stands.

    python -m tests.evidence_eval [--seed N] [--books 0 1 …]

Two sets, with the packaged 0.5B model on this machine: facts planted in chapters of real books
(PLANTED), and questions whose answer is one sentence of an original text (evidence_questions.json).
A passage is right when it holds half of the true sentence or more. Its place is right when the
source itself has that there: on those lines of the text file, on that page as pypdf extracts it, or
in the chapter of that title.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.planted_facts import is_right, make_facts, plant_in_epub, plant_in_text
from tsdoc.evidence import Passage
from tsdoc.home import find_home
from tsdoc.ingest.options import IngestOptions
from tsdoc.models.profiles import load_profile
from tsdoc.progress import Silent
from tsdoc.session import Session, open_session
from tsdoc.settings import Settings

REAL = Path(__file__).parents[2] / "shared/real"
QUESTIONS = Path(__file__).with_name("evidence_questions.json")
NUM_FACTS = 26
CHARS = 12_500
TOP = 3
# File, and for a text the line to begin at; for an EPUB the chapter's file and its title.
PLANTED: tuple[tuple[str, Any], ...] = (
    ("txt/northanger-abbey.txt", 407),
    ("txt/moby-dick.txt", 4_000),
    ("epub/sherlock-holmes.epub", ("epub/text/a-scandal-in-bohemia.xhtml", "I")),
    ("txt/northanger-abbey.txt", 5_012),
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """One question, where the truth stands, and a pattern of right answers."""

    question: str
    sentence: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Book:
    """A source and its questions."""

    name: str
    path: Path
    ingest: IngestOptions
    asked: list[Asked]


def planted_books(folder: Path, seed: int) -> Iterator[Book]:
    """Chapters of real books with facts planted by `seed`."""
    for number, (name, where) in enumerate(PLANTED):
        rng = random.Random(seed * 100 + number)
        facts = make_facts(NUM_FACTS, rng)
        source, target = REAL / name, folder / f"planted{number}{Path(name).suffix}"
        ingest = IngestOptions()
        if isinstance(where, int):
            lines = source.read_text("utf-8").split("\n")[where - 1 :]
            text = plant_in_text("\n".join(lines)[:CHARS], facts, rng)
            target.write_text(text, encoding="utf-8")
        else:
            member, title = where
            plant_in_epub(source, target, member, facts, rng)
            ingest = IngestOptions(section=title)
        asked = [Asked(fact.question, fact.sentence, fact.pattern) for fact in facts]
        yield Book(f"planted {number}: {name}", target, ingest, asked)


def original_books(folder: Path) -> Iterator[Book]:
    """Original texts and questions about one sentence of each."""
    for number, item in enumerate(json.loads(QUESTIONS.read_text("utf-8"))):
        source = path = REAL / item["source"]
        if "first_lines" in item:
            path = folder / f"original{number}.txt"
            lines = source.read_text("utf-8").split("\n")[: item["first_lines"]]
            path.write_text("\n".join(lines), encoding="utf-8")
        pages = tuple((a, b) for a, b in item["pages"]) if "pages" in item else None
        ingest = IngestOptions(section=item.get("section"), pages=pages)
        asked = [Asked(**question) for question in item["questions"]]
        yield Book(f"original {number}: {item['source']}", path, ingest, asked)


def letters(text: str) -> str:
    """Letters and digits alone: layout, hyphens and readers of PDFs differ in all else."""
    return re.sub(r"[\W_]", "", text)


def holds(text: str, sentence: str) -> bool:
    """Whether a text holds half of a sentence's words in a row, or more."""
    words, searched = sentence.split(), letters(text)
    need = (len(words) + 1) // 2
    return any(
        letters("".join(words[first : first + need])) in searched
        for first in range(len(words) - need + 1)
    )


def text_at_place(book: Book, session: Session, passage: Passage) -> str:
    """What the source itself has on the page, on the lines or in the chapter of a passage."""
    first, last = passage.first, passage.last
    if first.page is not None:
        import pypdf

        pages = pypdf.PdfReader(book.path).pages[first.page - 1 : (last.page or first.page)]
        return "".join(page.extract_text() for page in pages)
    if first.line is not None and last.line is not None:
        lines = book.path.read_text("utf-8").split("\n")[first.line - 1 : last.line]
        return "\n".join(lines)
    (section,) = [s for s in session.document.sections if s.titles == first.titles]
    return section.text


def run_book(book: Book, settings: Settings) -> list[dict[str, Any]]:
    """Asks everything about one book; one row per question."""
    rows = []
    with open_session(
        settings=settings,
        home=find_home(),
        sources=[str(book.path)],
        ingest=book.ingest,
        reporter=Silent(),
        offline=True,
    ) as session:
        begun = time.perf_counter()
        session.prepare()
        say(f"{book.name}: {len(session.prompt.ids)} tokens, {time.perf_counter() - begun:.0f} s")
        for asked in book.asked:
            answer = session.ask(asked.question, lambda text: None, keep_queries=True)
            answer = session.find_evidence(answer, count=5)
            assert answer.evidence is not None
            passages = answer.evidence.passages
            ranks = [n for n, p in enumerate(passages, 1) if holds(p.text, asked.sentence)]
            rank = ranks[0] if ranks else None
            row = {
                "book": book.name,
                "question": asked.question,
                "answer": answer.text,
                "right": is_right(answer.text, asked.answer),
                "rank": rank,
                "place": rank
                and holds(text_at_place(book, session, passages[rank - 1]), asked.sentence),
                "stands_out": answer.evidence.stands_out,
                "times_s": {name: round(value, 2) for name, value in answer.times_s.items()},
            }
            rows.append(row)
            say(json.dumps(row))
    return rows


def summary(rows: list[dict[str, Any]], name: str) -> str:
    """One line of figures over rows."""
    top = [row for row in rows if row["rank"] is not None and row["rank"] <= TOP]
    first = sum(row["rank"] == 1 for row in top)
    places = sum(bool(row["place"]) for row in top)
    share = len(top) / len(rows) if rows else 0.0
    return (
        f"{name}: {len(rows)} questions, true passage first {first}, "
        f"in the top {TOP} {len(top)} ({share:.1%}), place right {places} of {len(top)}"
    )


def say(line: str) -> None:
    """Prints at once, so that a long run can be followed."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Runs both sets and prints their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--books", type=int, nargs="*", help="only these, by number from 0")
    options = parser.parse_args()
    answer = {"max_new_tokens": 24}
    settings = Settings.model_validate({**load_profile("embedded"), "answer": answer})
    with tempfile.TemporaryDirectory() as name:
        books = [*original_books(Path(name)), *planted_books(Path(name), options.seed)]
        wanted = range(len(books)) if options.books is None else options.books
        rows = [row for number in wanted for row in run_book(books[number], settings)]
    for kind in ("planted", "original"):
        asked = [row for row in rows if row["book"].startswith(kind)]
        say(summary([row for row in asked if row["right"]], f"{kind}, answered correctly"))
        say(summary(asked, f"{kind}, all"))


if __name__ == "__main__":
    main()
