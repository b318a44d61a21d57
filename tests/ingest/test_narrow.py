"""Options that narrow a source say what they could not do, and what they leave out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.ingest.making import lines, make_pdf, make_tree, read, texts
from tsdoc.errors import InputError
from tsdoc.ingest.document import Document, PageStart, Section, SourceFile
from tsdoc.ingest.narrow import ways_to_narrow
from tsdoc.ingest.options import LAST_PAGE, IngestOptions
from tsdoc.ingest.sources import fingerprint_sources

TWO_PAGES = make_pdf([lines("one"), lines("two")])


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {f"{name}.md": f"# Title {name}\nx\n" for name in "abcd"}
    return make_tree(tmp_path / "r", {**files, "docs/e.txt": "y\n"})


def said(document: Document) -> list[tuple[str, str, str]]:
    return [(w.code, w.where, w.message) for w in document.warnings]


def test_pages_of_files_that_have_none_are_refused_before_reading(tree: Path) -> None:
    options = IngestOptions(pages=((1, 2),))
    for sources, lacking in (
        ([tree / "a.md"], "a.md: has no pages, and --pages asks for some"),
        ([tree], "none of the 5 files has pages"),
        ([tree / "a.md", tree / "b.md"], "none of the 2 files has pages"),
    ):
        with pytest.raises(InputError) as caught:
            fingerprint_sources([str(source) for source in sources], options)
        assert lacking in str(caught.value)
        assert "Use --section TITLE" in (caught.value.hint or "")


def test_files_without_pages_beside_one_with_pages_are_named(tree: Path) -> None:
    (tree / "z.pdf").write_bytes(TWO_PAGES)
    document = read(tree, pages=((2, 2),))
    assert texts(document)["z.pdf"] == "two\n"
    assert texts(document)["a.md"] == "# Title a\nx\n"
    message = "5 files have no pages and are read whole: a.md, b.md, c.md, …"
    assert said(document) == [("file_without_pages", "--pages", message)]
    few = read(tree / "a.md", tree / "z.pdf", pages=((2, LAST_PAGE),))
    message = "1 file has no pages and is read whole: a.md"
    assert said(few) == [("file_without_pages", "--pages", message)]
    assert said(read(tree / "z.pdf", pages=((2, LAST_PAGE),))) == []


@pytest.mark.parametrize(
    ("pages", "asked"),
    [
        (((2, 9),), "2-9"),
        (((1, 1), (3, 3)), "1, 3"),
        (((1, 2), (3, LAST_PAGE)), "1-2, 3-"),
        (((1, 2),), None),
        (((2, LAST_PAGE),), None),
    ],
)
def test_pages_behind_the_last_one_are_said(
    tmp_path: Path, pages: tuple[tuple[int, int], ...], asked: str | None
) -> None:
    path = tmp_path / "in.pdf"
    path.write_bytes(TWO_PAGES)
    message = f"ends with page 2; --pages asks for {asked}"
    expected = [] if asked is None else [("pages_beyond_end", "in.pdf", message)]
    assert said(read(path, pages=pages)) == expected
    assert said(read(path, pages=pages, strict=True)) == expected  # nothing that exists is missing


def test_files_without_the_section_are_named(tree: Path) -> None:
    document = read(tree, section="title b")
    message = "left out: 4 files without such a section (a.md, c.md, d.md, …)"
    assert said(document) == [("file_without_section", "--section 'title b'", message)]
    assert [(entry.name, entry.reason) for entry in document.skipped] == [
        (name, "no such section") for name in ("a.md", "c.md", "d.md", "docs/e.txt")
    ]
    assert said(read(tree / "b.md", section="title b")) == []


def test_a_pattern_that_matches_no_file_is_named(tree: Path) -> None:
    def unmatched(*sources: Path, **options: tuple[str, ...]) -> list[str]:
        warnings = read(*sources, **options).warnings
        assert {w.code for w in warnings} <= {"pattern_without_match"}
        assert {w.message for w in warnings} <= {"matches no file of the sources"}
        return [w.where for w in warnings]

    good = ("a.md", "doc*/", "./b.md", "!d.md")
    assert unmatched(tree, exclude=good) == []
    assert unmatched(tree, exclude=(*good, "dosc/", "dosc/", "[")) == [
        "--exclude 'dosc/'",
        "--exclude '['",
    ]
    assert unmatched(tree, include=("*.md", "*.rst"), exclude=("a.md",)) == ["--include '*.rst'"]
    assert unmatched(tree / "a.md", tree / "docs", exclude=("b.md",)) == ["--exclude 'b.md'"]
    odd = os.fsdecode(b"\xf5\n")
    assert unmatched(tree, exclude=(odd,)) == ["--exclude '\\udcf5\\n'"]


def test_a_pattern_that_an_excluded_file_matches_too_is_no_typo(tree: Path) -> None:
    assert said(read(tree, include=("a.md",), exclude=("docs/",))) == []


@pytest.mark.parametrize("pattern", ["[", "#", ""])
def test_include_with_a_pattern_that_is_none_does_not_read_everything(
    tree: Path, pattern: str
) -> None:
    with pytest.raises(InputError, match=r"holds no file .*left out: excluded\); given: --"):
        read(tree, include=(pattern,))


def test_a_named_file_that_is_excluded_is_counted_as_left_out(tree: Path) -> None:
    document = read(tree / "a.md", tree / "b.md", exclude=("b.md",))
    assert [(entry.name, entry.reason) for entry in document.skipped] == [("b.md", "excluded")]
    with pytest.raises(InputError, match=r"nothing to read .*\(left out: excluded\)"):
        read(tree / "b.md", exclude=("b.md",))
    with pytest.raises(InputError, match=r"--include 'c\.md' matches no file"):
        read(tree / "b.md", include=("c.md",))


def test_what_a_pattern_says_does_not_hide_why_nothing_was_read(tree: Path) -> None:
    (tree / "bad.pdf").write_text("no pdf")
    with pytest.raises(InputError, match=r"bad\.pdf is not a PDF"):
        read(tree, include=("*.pdf", "*.rst"))


def test_only_the_options_that_apply_are_advised() -> None:
    def ways(num_files: int, *sections: Section) -> str:
        files = tuple(
            SourceFile(name=f"{n}", path=None, kind="text", num_bytes=1, sha256="")
            for n in range(num_files)
        )
        return ways_to_narrow(Document(name="x", files=files, sections=sections))

    def section(*titles: str, pages: int = 0) -> Section:
        starts = tuple(PageStart(start=n, number=n + 1) for n in range(pages))
        return Section(file=0, titles=titles, text="text", first_line=None, pages=starts)

    assert ways(1, section()) == ways(1, section("Only")) == ways(1, section(pages=1)) == ""
    assert ways(1, section(pages=2)) == "--pages"
    assert ways(1, section("One"), section("Two")) == "--section"
    assert ways(1, section("One", pages=2), section("Two")) == "--pages or --section"
    assert ways(2, section(), section()) == "--exclude"
    everything = ways(2, section("One", pages=2), section("Two"))
    assert everything == "--pages, --section or --exclude"
