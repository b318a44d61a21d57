"""From a file of any kind to tokens and back: every word of a prompt knows where it stands.

Files of every kind are made from the same random blocks. Each word occurs once, so what the file
says of its page, line, cell or heading can be held against what the token map says.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.ingest.making import lines as pdf_lines
from tests.ingest.making import make_docx, make_epub, make_pdf, nav_point, read
from tests.prompt.test_tokenmap import build
from tsdoc.ingest.document import Document, Place
from tsdoc.prompt.tokenizer import TextTokenizer
from tsdoc.prompt.tokenmap import TokenMap

WORD = re.compile(r"w\d+")


@dataclass(frozen=True)
class Block:
    """A heading, or the lines of a paragraph."""

    heading: bool
    lines: tuple[tuple[str, ...], ...]

    @property
    def words(self) -> list[str]:
        return [word for line in self.lines for word in line]

    @property
    def title(self) -> str:
        return " ".join(self.words)


@st.composite
def blocks(draw: st.DrawFn) -> list[Block]:
    shapes = draw(
        st.lists(
            st.tuples(st.booleans(), st.lists(st.integers(1, 4), min_size=1, max_size=3)),
            min_size=1,
            max_size=8,
        )
    )
    number = 0
    made = []
    for heading, sizes in shapes:
        rows = []
        for size in sizes[:1] if heading else sizes:
            rows.append(tuple(f"w{n}" for n in range(number, number + size)))
            number += size
        made.append(Block(heading, tuple(rows)))
    return made


def write_files(root: Path, made: Sequence[Block]) -> None:
    """Writes the same blocks as a file of every kind."""
    paragraphs = ["\n".join(" ".join(line) for line in block.lines) for block in made]
    marked = [
        f"# {text}" if block.heading else text for block, text in zip(made, paragraphs, strict=True)
    ]
    (root / "a.txt").write_text("\n\n".join(paragraphs))
    (root / "a.md").write_text("\n\n\n".join(marked), newline="\r\n")
    tagged = [
        f"<h1 id='i{number}'>{text}</h1>" if block.heading else f"<p>{text}"
        for number, (block, text) in enumerate(zip(made, paragraphs, strict=True))
    ]
    (root / "a.html").write_text("<!doctype html>\n<head>\n</head>" + "\n<hr>\n".join(tagged))
    cells = [
        {"cell_type": "markdown" if block.heading else "code", "source": text}
        for block, text in zip(made, marked, strict=True)
    ]
    (root / "a.ipynb").write_text(json.dumps({"nbformat": 4, "cells": cells}))
    pages = [pdf_lines(*(" ".join(line) for line in block.lines)) for block in made]
    labels = "0 <</S/r>>"
    (root / "a.pdf").write_bytes(make_pdf(pages, labels=labels))
    headings = [(n, block) for n, block in enumerate(made) if block.heading]
    make_epub(
        root / "a.epub",
        {f"d{number}.xhtml": text for number, text in enumerate(tagged)},
        ncx="".join(nav_point(b.title, f"d{n}.xhtml#i{n}") for n, b in headings),
    )
    style = '<w:pPr><w:pStyle w:val="H"/></w:pPr>'
    rows = [
        f"<w:p>{style if block.heading else ''}<w:r><w:t>{text}</w:t></w:r></w:p>"
        for block, text in zip(made, paragraphs, strict=True)
    ]
    named = '<w:style w:styleId="H"><w:name w:val="heading 1"/></w:style>'
    make_docx(root / "a.docx", "".join(rows), styles=named)


def title_of(made: Sequence[Block], word: str) -> tuple[str, ...]:
    title: tuple[str, ...] = ()
    for block in made:
        title = (block.title,) if block.heading else title
        if word in block.words:
            return title
    raise AssertionError(word)


def number_of(made: Sequence[Block], word: str) -> int:
    return next(number for number, block in enumerate(made, 1) if word in block.words)


def check_place(root: Path, made: Sequence[Block], word: str, place: Place) -> None:
    kind = place.file.rpartition(".")[2]
    if kind in ("txt", "md", "html"):
        assert place.line is not None
        row = (root / place.file).read_bytes().decode().split("\n")[place.line - 1]
        assert word in WORD.findall(row)
    else:
        assert place.line is None
    assert place.cell == (number_of(made, word) if kind == "ipynb" else None)
    assert place.page == (number_of(made, word) if kind == "pdf" else None)
    if kind not in ("txt", "pdf"):
        assert place.titles == title_of(made, word)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # each example starts a process
)
@given(made=blocks())
def test_every_word_of_every_kind_of_file_knows_its_place(
    byte_level: TextTokenizer, made: list[Block]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_files(root, made)
        document = read(root)
        assert len(document.files) == 7
        found: dict[str, list[str]] = {file.name: [] for file in document.files}
        token_map = build(document, byte_level).map
        for number, section in enumerate(document.sections):
            start, end = token_map.section_range(number)
            assert token_map.text(start, end) == section.text
            for match in WORD.finditer(section.text):
                place = document.locate(number, match.start())
                assert token_map.locate(number, match.start()) == place
                check_place(root, made, match[0], place)
                found[place.file].append(match[0])
            for token in range(start, end):
                check_token(document, token_map, token)
        words = [word for block in made for word in block.words]
        assert all(kept == words for kept in found.values()), found


def check_token(document: Document, token_map: TokenMap, token: int) -> None:
    """A token's place is that of the first character of its span."""
    for span in token_map.spans(token, token + 1):
        place = token_map.place(token)
        assert place == document.locate(span.section, span.start)


@pytest.mark.parametrize("kind", ["epub", "docx"])
def test_kinds_without_lines_are_located_by_their_headings(tmp_path: Path, kind: str) -> None:
    write_files(tmp_path, [Block(True, (("w1",),)), Block(False, (("w2",),))])
    document = read(tmp_path / f"a.{kind}")
    place = document.locate(0, document.sections[0].text.index("w2"))
    assert (place.titles, str(place)) == (("w1",), f"a.{kind}")
