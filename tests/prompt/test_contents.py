from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt.strategies import documents
from tsdoc.ingest.document import Document, PageStart, Section, SourceFile
from tsdoc.prompt.contents import contents_text
from tsdoc.prompt.estimate import estimate_tokens


def _document(sections: list[tuple[str, tuple[str, ...], int | None]]) -> Document:
    """Sections as (file name, titles, page)."""
    names = list(dict.fromkeys(name for name, _, _ in sections))
    return Document(
        name="made",
        files=tuple(
            SourceFile(name=name, path=None, kind="text", num_bytes=1, sha256="") for name in names
        ),
        sections=tuple(
            Section(
                file=names.index(name),
                titles=titles,
                text="x",
                first_line=None if page else 7,
                pages=(PageStart(start=0, number=page),) if page else (),
            )
            for name, titles, page in sections
        ),
    )


_BOOK = _document(
    [
        ("src/main.py", (), None),
        ("src/deep/a.md", ("One",), None),
        ("src/deep/b.md", (), None),
        ("book.pdf", ("4",), 12),
        ("book.pdf", ("4", "4.2 Files"), 13),
    ]
)


def test_the_contents_show_directories_files_titles_and_where_they_begin() -> None:
    assert contents_text(_BOOK, tree_tokens=1000) == (
        "<contents>\n"
        "- src/\n"
        "  - main.py\n"
        "  - deep/\n"
        "    - a.md\n"
        "      - One (line 7)\n"
        "    - b.md\n"
        "- book.pdf\n"
        "  - 4 (p. 12)\n"
        "    - 4.2 Files (p. 13)\n"
        "</contents>\n"
    )


def test_a_small_budget_hides_the_deepest_levels_and_says_how_much() -> None:
    assert contents_text(_BOOK, tree_tokens=35) == (
        "<contents>\n- src/ [3 files]\n- book.pdf [2 sections]\n</contents>\n"
    )


def test_a_budget_below_the_top_level_shows_its_first_entries() -> None:
    document = _document([(f"file{n}.txt", (), None) for n in range(500)])
    text = contents_text(document, tree_tokens=60)
    assert text.startswith("<contents>\n- file0.txt\n- file1.txt\n")
    assert text.endswith(" more\n</contents>\n")
    shown = text.count("- file")
    assert f"- … {500 - shown} more\n" in text


def test_no_budget_and_a_single_section_have_no_contents() -> None:
    assert contents_text(_BOOK, tree_tokens=0) == ""
    assert contents_text(_document([("a", (), None)]), tree_tokens=100) == ""


def test_names_cannot_end_the_contents() -> None:
    document = _document([("\n</contents>\n", (), None), ("b", ("</contents>",), None)])
    lines = contents_text(document, tree_tokens=1000).splitlines()
    assert [line for line in lines if line.startswith("<")] == ["<contents>", "</contents>"]


def test_very_deep_paths_are_laid_out() -> None:
    document = _document([("d/" * 2000 + "a", (), None), ("b", (), None)])
    assert contents_text(document, tree_tokens=100).startswith("<contents>\n- d/")


@settings(max_examples=50, deadline=None)
@given(documents(), st.integers(0, 200))
def test_the_contents_keep_to_their_budget(document: Document, budget: int) -> None:
    assert estimate_tokens(contents_text(document, tree_tokens=budget)) <= budget
