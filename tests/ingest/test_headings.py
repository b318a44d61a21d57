"""Sections of plain text and Markdown."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from tsdoc.ingest.chapters import split_text
from tsdoc.ingest.headings import Heading, split_at
from tsdoc.ingest.markdown import split_markdown

PROSE = "It was a dark night, and the rain fell in torrents on every roof of the old town. " * 3
PIECES = st.sampled_from(
    [
        "\n",
        "\n\n",
        "# One",
        "## Two\n",
        "Title\n=====\n",
        "```\n",
        "~~~\n# not\n",
        "text ",
        "CHAPTER I\n\n",
        "\n\nChapter 2. Storms\n\n",
        "\n\nII\n\n",
        "\x0c",
        "\u2028",
        "\r",
        PROSE,
    ]
)


@given(st.lists(PIECES | st.text(max_size=20), max_size=30).map("".join))
def test_sections_give_back_exactly_the_text(text: str) -> None:
    for split in (split_text, split_markdown):
        parts = split(text)
        assert "".join(part.text for part in parts) == (text if text.strip() else "")
        line = 1
        for part in parts:
            assert part.first_line == line
            line += part.text.count("\n")


@given(st.text(alphabet="ab \n", max_size=60), st.lists(st.integers(0, 60), max_size=8))
def test_cuts_anywhere_lose_and_double_nothing(text: str, cuts: list[int]) -> None:
    headings = [
        Heading(start=min(cut, len(text)), depth=1 + cut % 3, title=f"h{cut}")
        for cut in sorted(cuts)
    ]
    parts = split_at(text, headings)
    assert "".join(part.text for part in parts) == (text if text.strip() else "")
    assert all(part.text.strip() for part in parts)


def test_chapters_of_a_novel() -> None:
    text = f"THE NIGHT\n\nby Nobody\n\n\nCHAPTER 1\n\n\n{PROSE}\n\nCHAPTER 2\n\n{PROSE}\n"
    parts = split_text(text)
    assert [part.titles for part in parts] == [(), ("CHAPTER 1",), ("CHAPTER 2",)]
    assert [part.first_line for part in parts] == [1, 6, 11]


def test_parts_hold_chapters_and_a_list_of_contents_is_not_cut() -> None:
    contents = "CONTENTS\n\nPart One\n\nChapter I\n\nChapter II\n\n"
    text = (
        f"{contents}Part One\n\nChapter I. The Sea\n\n{PROSE}\n\nChapter II. The Land\n\n{PROSE}\n"
        f"\nEpilogue\n\n{PROSE}\n"
    )
    parts = split_text(text)
    assert [part.titles for part in parts] == [
        (),
        ("Part One", "Chapter I. The Sea"),
        ("Part One", "Chapter II. The Land"),
        ("Epilogue",),
    ]


def test_numerals_alone_are_chapters_if_they_count_up_from_one() -> None:
    text = "".join(f"{number}\n\n{PROSE}\n\n" for number in ("I", "II", "III"))
    assert [part.titles for part in split_text(text)] == [("I",), ("II",), ("III",)]
    assert len(split_text(text.replace("II", "V"))) == 1


def test_the_word_chapter_in_prose_is_no_heading() -> None:
    text = f"{PROSE}\nChapter 3 was long.\n\nvolume two of the Spectator, such a work\n\n{PROSE}"
    assert len(split_text(text)) == 1


def test_markdown_headings_nest_and_code_fences_are_respected() -> None:
    text = "# A\nintro\n```sh\n# no heading\n```\n## B ##\nb\n\nC\n---\nc\n~~~~\n## no\n~~~\n# no\n"
    parts = split_markdown(text)
    assert [part.titles for part in parts] == [("A",), ("A", "B"), ("A", "C")]
    assert parts[2].first_line == 9


def test_front_matter_tables_and_rules_are_no_headings() -> None:
    text = "---\ntitle: x\n---\n\n| a |\n---\n\n- item\n---\n\npara\nof two\n---\n"
    assert [part.titles for part in split_markdown(text)] == [()]


def test_a_heading_without_text_of_its_own_joins_the_deeper_one() -> None:
    parts = split_markdown("# A\n\n## B\n\ntext\n")
    assert [(part.titles, part.text) for part in parts] == [(("A", "B"), "# A\n\n## B\n\ntext\n")]
