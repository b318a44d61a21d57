"""tokens and text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.cli.conftest import Cli, FakeServices, make_document
from tests.ingest.making import make_tree
from tsdoc.cli.counting import (
    Counts,
    Node,
    build_tree,
    count_document,
    counts_json,
    tree_lines,
)
from tsdoc.ingest.document import (
    Document,
    IngestWarning,
    PageStart,
    Section,
    SkippedFile,
    SourceFile,
)
from tsdoc.ingest.options import IngestOptions
from tsdoc.ingest.sources import read_sources
from tsdoc.prompt.layout import prompt_text


def count_words(texts: Iterable[str]) -> Iterator[int]:
    return (len(text.split()) for text in texts)


def test_tokens_shows_the_biggest_first(cli: Cli, services: FakeServices) -> None:
    services.count = count_words
    result = cli("tokens", "x")
    lines = [line.strip() for line in result.stdout.splitlines()]
    labels = [line.rsplit("%  ", 1)[-1] for line in lines[1:]]
    assert labels[:6] == [
        "total",
        "├─ big.txt",
        "│  ├─ Two (line 7)",
        "│  └─ One (line 1)",
        "├─ (table of contents)",
        "└─ a/",
    ]
    total = sum(count_words(prompt_text(services.document, tree_tokens=1024)))
    assert lines[1].startswith(f"{total}  100.0 %")
    assert "≈" not in result.stdout
    assert result.stderr == "warning: big.txt: guessed\nleft out: logo.png (binary, 2.0 kB)\n"


def test_tokens_fits_80_columns(cli: Cli, services: FakeServices) -> None:
    section = Section(file=1, titles=("long title " * 20,), text="x", first_line=1)
    services.document = make_document(sections=(section,))
    lines = re.sub(r"\x1b\[\d*m", "", cli("tokens", "x", terminal=True).stdout).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["≈69", "100.0", "%", "total"]


def test_estimates_are_marked(cli: Cli) -> None:
    assert cli("tokens", "x").stdout.count("≈") > 4
    assert cli("tokens", "x", "--json").json()["estimated"] is True


def test_tokens_as_json(cli: Cli, services: FakeServices) -> None:
    services.count = count_words
    value = cli("tokens", "x", "--json").json()
    assert value["schema"] == "tsdoc.tokens/1"
    assert value["estimated"] is False
    assert [file["name"] for file in value["files"]] == ["big.txt", "a/small.txt"]
    assert [s["titles"] for s in value["files"][0]["sections"]] == [["Two"], ["One"]]
    total = value["contents_tokens"] + sum(file["tokens"] for file in value["files"])
    assert total == value["tokens"]
    assert value["skipped"] == [{"name": "logo.png", "reason": "binary", "bytes": 2048}]
    assert value["warnings"][0]["code"] == "decoded_lossily"


def test_files_of_one_name_are_told_apart_by_their_paths(
    cli: Cli, services: FakeServices, tmp_path: Path
) -> None:
    for folder in ("a", "x/b", "y/b"):
        make_tree(tmp_path / folder, {"f.txt": f"{folder}\n", "g.txt": "g\n"})
    sources = [str(tmp_path / folder) for folder in ("a", "x/b", "y/b")]
    services.document = read_sources(sources, IngestOptions())
    listed = cli("tokens", *sources, "--json").json()["files"]
    assert {file["name"]: file["path"] for file in listed if "f" in file["name"]} == {
        "f.txt": f"{tmp_path}/a/f.txt",
        "b/f.txt": f"{tmp_path}/x/b/f.txt",
        "b (2)/f.txt": f"{tmp_path}/y/b/f.txt",
    }
    said = cli("tokens", *sources).stderr.splitlines()
    assert said == [f"b (2) is {tmp_path}/y/b"]


def test_sections_of_pages_tell_their_pages() -> None:
    pages = (PageStart(start=0, number=3), PageStart(start=2, number=9))
    section = Section(file=1, titles=("One",), text="text", first_line=None, pages=pages)
    document = make_document(sections=(section,))
    counts = count_document(document, count_words, tree_tokens=0)
    labels = [label for _, label in tree_lines(build_tree(document, counts), max_children=None)]
    assert labels == ["total", "└─ big.txt", "   └─ One (p. 3-9)"]


def test_a_heading_with_text_and_headings_below_it_is_one_line() -> None:
    sections = tuple(
        Section(file=0, titles=titles, text="x", first_line=line)
        for line, titles in ((1, ("One",)), (5, ("One", "A")), (9, ("One", "B")), (12, ("Two",)))
    )
    file = SourceFile(name="a.md", path=None, kind="markdown", num_bytes=1, sha256="0")
    document = Document(name="a.md", files=(file,), sections=sections)
    counts = Counts(sections=(7, 4, 3, 2), contents=0, estimated=False)
    assert list(tree_lines(build_tree(document, counts), max_children=None)) == [
        (16, "total"),
        (16, "└─ a.md"),
        (14, "   ├─ One (line 1)"),
        (4, "   │  ├─ A (line 5)"),
        (3, "   │  └─ B (line 9)"),
        (2, "   └─ Two (line 12)"),
    ]


def test_the_pages_of_a_heading_are_those_of_all_that_is_below_it() -> None:
    def section(page: int, last: int, *titles: str) -> Section:
        pages = tuple(PageStart(start=n, number=page + n) for n in range(last + 1 - page))
        return Section(file=0, titles=titles, text="text" * 9, first_line=None, pages=pages)

    sections = (
        section(3, 3, "One"), section(3, 5, "One", "A"), section(5, 9, "One", "B"),
        section(10, 11, "Two", "C"), section(11, 11, "Two", "D"),
    )  # fmt: skip
    file = SourceFile(name="a.pdf", path=None, kind="pdf", num_bytes=1, sha256="0")
    document = Document(name="a.pdf", files=(file,), sections=sections)
    counts = Counts(sections=(7, 4, 3, 2, 1), contents=0, estimated=False)
    assert list(tree_lines(build_tree(document, counts), max_children=None)) == [
        (17, "total"),
        (17, "└─ a.pdf"),
        (14, "   ├─ One (p. 3-9)"),
        (4, "   │  ├─ A (p. 3-5)"),
        (3, "   │  └─ B (p. 5-9)"),
        (3, "   └─ Two (p. 10-11)"),
        (2, "      ├─ C (p. 10-11)"),
        (1, "      └─ D (p. 11)"),
    ]
    files: Any = counts_json(document, counts)["files"]
    places = {s["titles"][-1]: (s["place"], s["tokens"]) for s in files[0]["sections"]}
    assert places["One"] == ("p. 3", 7)  # its own text alone, both


def test_many_children_are_summed_up() -> None:
    root = Node("total", 15)
    for number in range(5):
        root.child(str(number), f"n{number}").tokens = number + 1
    assert list(tree_lines(root, max_children=3)) == [
        (15, "total"),
        (5, "├─ n4"),
        (4, "├─ n3"),
        (6, "└─ … 3 more"),
    ]


def test_small_parts_are_not_opened_where_that_is_asked_for() -> None:
    root = Node("total", 100)
    for name, tokens in (("a", 60), ("b", 40)):
        node = root.child(name, name)
        node.tokens = tokens
        node.child("x", "x").tokens = tokens
    assert list(tree_lines(root, max_children=None, open_from=0.5)) == [
        (100, "total"),
        (60, "├─ a"),
        (60, "│  └─ x"),
        (40, "└─ b"),
    ]


def test_a_long_tree_ends_with_its_total_and_says_that_it_is_cut(
    cli: Cli, services: FakeServices
) -> None:
    names = [f"{folder}/{file}.txt" for folder in range(30) for file in range(5)]
    services.document = make_document(
        files=tuple(
            SourceFile(name=name, path=None, kind="text", num_bytes=10, sha256="0" * 64)
            for name in names
        ),
        sections=tuple(
            Section(file=number, titles=(), text="few words", first_line=1)
            for number in range(len(names))
        ),
        warnings=(),
        skipped=(),
    )
    services.count = count_words
    result = cli("tokens", "x")
    total = cli("tokens", "x", "--json").json()["tokens"]
    assert result.stderr == (
        f"{total:,} tokens in 150 files; these are the biggest parts, --all shows every one\n"
    )
    assert len(result.stdout.splitlines()) == 22
    whole = cli("tokens", "x", "--all")
    assert len(whole.stdout.splitlines()) == 183
    assert whole.stderr == ""


def test_many_empty_files_are_counted(cli: Cli, services: FakeServices) -> None:
    def skip(count: int) -> str:
        services.document = make_document(
            warnings=(),
            skipped=tuple(
                SkippedFile(name=f"{number}/__init__.py", reason="empty", num_bytes=0)
                for number in range(count)
            ),
        )
        return cli("tokens", "x").stderr

    assert skip(1) == "left out: 0/__init__.py (empty, 0 B)\n"
    assert skip(4) == "left out: 4 empty files; --json names them all\n"


def test_text_is_exactly_what_enters_the_prompt(cli: Cli, services: FakeServices) -> None:
    result = cli("text", "x")
    expected = "".join(prompt_text(services.document, tree_tokens=1024))
    assert result.stdout == expected
    assert "left out: logo.png" in result.stderr
    assert cli("text", "x", "--json").json()["text"] == expected


def test_files_without_the_section_asked_for_are_named_once(
    cli: Cli, services: FakeServices
) -> None:
    skipped = (
        SkippedFile(name="b.md", reason="no such section", num_bytes=1),
        SkippedFile(name="c.md", reason="excluded", num_bytes=1),
    )
    warning = IngestWarning(code="file_without_section", where="--section 'x'", message="b.md")
    services.document = make_document(skipped=skipped, warnings=(warning,))
    assert cli("text", "x").stderr == (
        "warning: --section 'x': b.md\nleft out: 1 by --include and --exclude\n"
    )


def test_text_obeys_the_budget_of_the_table_of_contents(cli: Cli, services: FakeServices) -> None:
    result = cli("text", "x", "--set", "tree_tokens=0")
    assert result.stdout == "".join(prompt_text(services.document, tree_tokens=0))
