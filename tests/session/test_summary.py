"""Parts, citations and summaries on a tiny random model."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.session.conftest import Recorder
from tsdoc.home import Home
from tsdoc.ingest.document import Document, Mark, PageStart, Section, SourceFile
from tsdoc.prompt.assemble import build_prompt
from tsdoc.session import Session
from tsdoc.session.anchors import Anchors
from tsdoc.session.kept_summaries import MAX_DOCUMENTS, KeptSummaries, remove_summaries
from tsdoc.session.parts import MIN_TOKENS, Part, split_document
from tsdoc.session.question import LaidOut, lay_out
from tsdoc.session.summary import CitedSentence, Summarizer, Summary, without_repetitions

Start = Callable[..., Session]
PLACES = [
    "The harbour of Velm lies below a chalk cliff and freezes every January.",
    "Its lighthouse was rebuilt by Oda Brandt after the storm of 1871.",
    "Nobody has seen the lamp go out since the new generator came.",
]


def chapter(name: str, filler: int = 60) -> str:
    lines = [
        f"{name} line {n} tells of crate {n * 7 % 31} and barrel {n * 3 % 17}."
        for n in range(filler)
    ]
    return "\n".join([*lines[: filler // 2], *PLACES, *lines[filler // 2 :]]) + "\n"


def make_document(*sections: Section, names: tuple[str, ...] = ("a.txt", "b.txt")) -> Document:
    files = tuple(
        SourceFile(name=name, path=None, kind="text", num_bytes=1, sha256="0" * 64)
        for name in names
    )
    return Document(name="shelf", files=files, sections=sections)


def parts_of(session: Session, document: Document, by: str) -> list[Part]:
    prompt = build_prompt(document, session.tokenizer, session.template, tree_tokens=0)
    return split_document(document, prompt, by)  # type: ignore[arg-type]


@pytest.fixture
def session(start: Start) -> Session:
    return start()


def test_parts_are_sections_and_short_ones_join_the_one_before(session: Session) -> None:
    document = make_document(
        Section(file=0, titles=(), text="A short start.\n", first_line=1),
        Section(file=0, titles=("One",), text=chapter("One"), first_line=2),
        Section(file=0, titles=("One", "Note"), text="A short note.\n\n\n", first_line=65),
        Section(file=0, titles=("Two",), text=chapter("Two"), first_line=68),
        Section(file=1, titles=("Three",), text="Short, but of another file.", first_line=None),
    )
    sections = parts_of(session, document, "section")
    assert [(part.title, part.sections) for part in sections] == [
        ("a.txt", (0, 1)),
        ("One", (1, 3)),
        ("Two", (3, 4)),
        ("Three", (4, 5)),
    ]
    assert [part.where for part in sections] == ["a.txt:1", "a.txt:2-65", "a.txt:68-130", "b.txt"]
    assert sections[1].tokens[1] == sections[2].tokens[0]
    assert sections[2].tokens[1] - sections[2].tokens[0] >= MIN_TOKENS
    files = parts_of(session, document, "file")
    assert [(part.title, part.sections) for part in files] == [("a.txt", (0, 4)), ("b.txt", (4, 5))]


def section(*titles: str, file: int = 0) -> Section:
    """A short section, of more than half of MIN_TOKENS."""
    return Section(file=file, titles=titles, text="\n".join(PLACES), first_line=1)


def test_a_run_of_short_sections_is_cut_and_each_part_names_its_first_and_last(
    session: Session,
) -> None:
    chapters = [section("Book", f"Chapter {number}") for number in range(1, 7)]
    document = make_document(*chapters)
    bounds = build_prompt(document, session.tokenizer, session.template, tree_tokens=0).map
    lengths = [end - start for start, end in map(bounds.section_range, range(6))]
    assert all(MIN_TOKENS / 2 < length < MIN_TOKENS for length in lengths)
    parts = parts_of(session, document, "section")
    assert [part.title for part in parts] == [
        "Book › Chapter 1 – Chapter 2",
        "Book › Chapter 3 – Chapter 4",
        "Book › Chapter 5 – Chapter 6",
    ]
    assert parts[1].headings == (("Book", "Chapter 3"), ("Book", "Chapter 4"))
    assert [part.sections for part in parts] == [(0, 2), (2, 4), (4, 6)]


@pytest.mark.parametrize(
    ("titles", "expected"),
    [
        # One heading stands above all of it.
        ([("One",), ("One", "a")], ["One"]),
        # The heading goes on behind this part.
        ([("One",), ("One", "a"), ("One", "b")], ["One – a", "One › b"]),
        ([("One", "a"), ("Two", "b")], ["One › a – Two › b"]),
        ([("One", "a"), ("One",)], ["One › a – One"]),
        ([("One",), ("One",)], ["One"]),
        ([(), ("One",)], ["a.txt"]),
        ([(), ("One",), ("Two",)], ["a.txt – One", "Two"]),
        ([("One",), ("Two",)], ["One – Two"]),
    ],
)
def test_a_title_covers_all_that_was_joined(
    session: Session, titles: list[tuple[str, ...]], expected: list[str]
) -> None:
    document = make_document(*(section(*names) for names in titles))
    assert [part.title for part in parts_of(session, document, "section")] == expected


def test_short_sections_of_two_files_stay_apart(session: Session) -> None:
    document = make_document(section("One"), section("Two", file=1))
    assert [part.title for part in parts_of(session, document, "section")] == ["One", "Two"]


def test_parts_of_a_notebook_name_their_cells(session: Session) -> None:
    text = chapter("X", 4)
    cells = (Mark(start=0, number=2), Mark(start=text.index("\n") + 1, number=3))
    document = make_document(
        Section(file=0, titles=(), text=text, first_line=None, cells=cells),
        Section(file=1, titles=(), text=text, first_line=None, cells=cells[:1]),
    )
    assert [part.where for part in parts_of(session, document, "section")] == [
        "a.txt cell 2-3",
        "b.txt cell 2",
    ]


def test_parts_of_pages_name_them(session: Session) -> None:
    pages = tuple(PageStart(start=at, number=n, label=f"{n - 2}") for at, n in ((0, 3), (2000, 4)))
    document = make_document(
        Section(file=0, titles=("One",), text=chapter("One"), first_line=None, pages=pages),
        Section(file=1, titles=("Two",), text=chapter("Two"), first_line=None, pages=pages[:1]),
    )
    assert [part.where for part in parts_of(session, document, "section")] == [
        "a.txt p. 3-4",
        "b.txt p. 3 (printed 1)",
    ]


def test_empty_sections_are_no_parts(session: Session) -> None:
    document = make_document(Section(file=0, titles=(), text=" \n", first_line=1))
    assert parts_of(session, document, "section") == []


@pytest.fixture
def anchors(session: Session) -> Anchors:
    document = make_document(
        Section(file=0, titles=("One",), text=chapter("One"), first_line=1),
        Section(file=0, titles=("Two",), text=chapter("Two").replace("Oda", "Udo"), first_line=64),
    )
    prompt = build_prompt(document, session.tokenizer, session.template, tree_tokens=0)
    return Anchors(document, prompt.map, (0, 2))


@pytest.mark.parametrize(
    ("sentence", "line"),
    [
        ("Oda Brandt rebuilds the lighthouse when a storm has broken it.", 32),
        ("Udo Brandt rebuilds the lighthouse when a storm has broken it.", 95),
        ("In January the harbour below the cliff is frozen.", 31),
    ],
)
def test_a_sentence_is_cited_where_the_text_says_it(
    anchors: Anchors, sentence: str, line: int
) -> None:
    place = anchors.find(sentence)
    assert place is not None
    assert place.line == line


@pytest.mark.parametrize(
    "sentence",
    [
        "Penguins juggle seventeen accordions under a violet sky.",
        "It is the way it is.",
        "",
        "Velm",
    ],
)
def test_a_sentence_of_other_words_has_no_place(anchors: Anchors, sentence: str) -> None:
    assert anchors.find(sentence) is None


def test_a_heading_is_no_place(session: Session) -> None:
    text = chapter("Barrels").replace("Barrels line", "Line")
    document = make_document(
        Section(
            file=0, titles=("Barrels", "Part Seven"), text=f"## Part Seven\n\n{text}", first_line=1
        )
    )
    prompt = build_prompt(document, session.tokenizer, session.template, tree_tokens=0)
    anchors = Anchors(document, prompt.map, (0, 1))
    place = anchors.find("In Part Seven of Barrels, the harbour below the cliff is frozen.")
    assert place is not None
    assert place.line == 33
    assert anchors.nearest("In Part Seven") is None


def test_the_line_that_shares_most_is_cited_and_not_the_rarest_word(session: Session) -> None:
    text = f"LEASE AGREEMENT\n\nThe landlord is Birch Estates Ltd.\n\n{chapter('Lease')}"
    document = make_document(Section(file=0, titles=(), text=text, first_line=1))
    prompt = build_prompt(document, session.tokenizer, session.template, tree_tokens=0)
    place = Anchors(document, prompt.map, (0, 1)).find(
        "By this agreement the landlord is Birch Estates Ltd."
    )
    assert place is not None
    assert place.line == 3


def test_a_text_that_is_close_to_nothing_has_a_nearest_place(anchors: Anchors) -> None:
    loose = "She was so glad that her friend, of whom Udo had spoken, would wed him in the end."
    assert anchors.find(loose) is None
    place = anchors.nearest(loose)
    assert place is not None
    assert place.line == 95
    assert anchors.nearest("Penguins juggle seventeen accordions.") is None


def test_an_empty_text_has_no_places(session: Session) -> None:
    document = make_document(Section(file=0, titles=(), text="", first_line=1))
    prompt = build_prompt(document, session.tokenizer, session.template, tree_tokens=0)
    anchors = Anchors(document, prompt.map, (0, 1))
    assert anchors.find("Oda Brandt") is None
    assert anchors.nearest("Oda Brandt") is None


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.md"
    path.write_text("".join(f"# Chapter {n}\n\n{chapter(f'C{n}', 16)}\n" for n in "123"), "utf-8")
    return path


def ignore(sentence: CitedSentence) -> None:
    pass


def summarise(
    start: Start, book: Path, **groups: dict[str, object]
) -> tuple[list[Summary], Summary]:
    with start(sources=[str(book)], **groups) as session:
        summarizer = Summarizer(session, "short", max_new_tokens=24)
        parts = split_document(session.document, session.prompt, "section")
        assert [part.title for part in parts] == ["Chapter 1", "Chapter 2", "Chapter 3"]
        done = []
        for part in parts:
            kept = summarizer.kept_part(part)
            done.append(kept or summarizer.part(part))
        return done, summarizer.of_summaries(list(zip(parts, done, strict=True)), ignore)


def test_parts_are_kept_for_the_next_run(start: Start, home: Home, book: Path) -> None:
    first, whole = summarise(start, book)
    second, again = summarise(start, book)
    assert [summary.answer is None for summary in [*first, *second]] == [False] * 3 + [True] * 3
    assert [(s.sentences, s.nearest) for s in second] == [(s.sentences, s.nearest) for s in first]
    assert again.text == whole.text
    files = list((home.records / "summaries").glob("*/*.json"))
    assert len(files) == 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    (directory,) = {file.parent for file in files}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    remove_summaries(home, keep=[directory.name])
    assert directory.exists()
    remove_summaries(home, keep=[])
    assert not directory.exists()


def test_other_settings_or_another_text_make_new_summaries(start: Start, book: Path) -> None:
    summarise(start, book)
    same, _ = summarise(start, book, answer={"evidence": 7})
    assert all(summary.answer is None for summary in same)
    warmer, _ = summarise(start, book, answer={"temperature": 0.5})
    assert all(summary.answer is not None for summary in warmer)
    book.write_text(book.read_text("utf-8").replace("C3 line 5", "C3 line 6"), "utf-8")
    changed, _ = summarise(start, book)
    assert all(summary.answer is not None for summary in changed)


def test_without_a_store_nothing_is_kept(start: Start, home: Home, book: Path) -> None:
    done, _ = summarise(start, book, store={"enabled": False})
    assert all(summary.answer is not None for summary in done)
    assert not (home.records / "summaries").exists()


def test_a_part_selects_only_within_itself(start: Start, book: Path) -> None:
    """With everything else changed, bar the first tokens and the local window, it says the same."""
    with start(Recorder(), sources=[str(book)]) as session:
        parts = split_document(session.document, session.prompt, "section")
        seen: list[object] = []

        def spy(*asked: Any, **options: Any) -> LaidOut:
            laid_out = lay_out(*asked, **options)
            seen.append(laid_out.config.allowed)
            return laid_out

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tsdoc.session.session.lay_out", spy)
            Summarizer(session, "short", max_new_tokens=4).part(parts[1])
        (allowed,) = seen
        prompt_len = len(session.prompt.ids)
        assert isinstance(allowed, list)
        assert allowed[0] == parts[1].tokens
        assert allowed[1][0] == prompt_len


def test_the_summary_of_summaries_reads_them_and_not_the_document(start: Start, book: Path) -> None:
    with start(sources=[str(book)]) as session:
        parts = split_document(session.document, session.prompt, "section")
        made = [cited(f"Sum {part.title}.") for part in parts]
        summary = Summarizer(session, "short", max_new_tokens=8).of_summaries(
            list(zip(parts, made, strict=True)), ignore
        )
    assert summary.answer is not None
    assert "Chapter 2: Sum Chapter 2." in summary.answer.question


def cited(*texts: str) -> Summary:
    sentences = tuple(CitedSentence(text=text, place=None) for text in texts)
    return Summary(
        sentences=sentences, nearest=None, finish_reason="stop", generated_tokens=1, answer=None
    )


def test_a_summary_is_never_left_empty() -> None:
    same = "one two three four five six seven eight nine"
    shown = without_repetitions([cited(same), cited(same), cited(same, "More."), cited(same)])
    assert [[s.text for s in sentences] for sentences in shown] == [
        [same], [same], ["More."], [same],
    ]  # fmt: skip


def test_only_so_many_documents_have_summaries(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsdoc.session.kept_summaries.MAX_DOCUMENTS", 2)
    assert MAX_DOCUMENTS > 2
    for number in range(3):
        KeptSummaries(home=home, record=f"r{number}").save("k", {"n": number})
        os.utime(home.records / "summaries" / f"r{number}", (number, number))
    KeptSummaries(home=home, record="r3").save("k", {"n": 3})
    assert KeptSummaries(home=home, record="r3").load("k") == {"n": 3}
    assert sorted(path.name for path in (home.records / "summaries").iterdir()) == ["r2", "r3"]
