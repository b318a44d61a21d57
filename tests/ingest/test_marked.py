"""EPUB, DOCX, HTML and notebooks."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.ingest.making import make_docx, make_epub, nav_point, read, whole
from tsdoc.errors import InputError
from tsdoc.ingest.html import declared_encoding, read_html
from tsdoc.ingest.notebook import read_notebook
from tsdoc.ingest.xml_tree import parse_xml


def test_an_epub_is_read_in_spine_order_with_titles_of_its_contents(tmp_path: Path) -> None:
    book = "<h1 id='p1'>Part I</h1><h2 id='c 1'>One</h2><p>alpha</p><h2 id='c2'>Two</h2><p>beta</p>"
    path = make_epub(
        tmp_path / "b.epub",
        {
            "z.xhtml": "<h1>End</h1><p>gamma</p>",
            "a b.xhtml": book,
            "loose.xhtml": "<h1>Loose</h1>x",
        },
        spine=["a b.xhtml", "z.xhtml", "loose.xhtml"],
        hrefs={"a b.xhtml": "a%20b.xhtml#p1"},
        ncx=nav_point(
            "First Part",
            "a%20b.xhtml#p1",
            nav_point("Chapter One", "a%20b.xhtml#c%201")
            + nav_point("Chapter Two", "a%20b.xhtml#c2"),
        )
        + nav_point("The End", "z.xhtml"),
    )
    document = read(path)
    assert [(s.titles, s.text.split()[-1]) for s in document.sections] == [
        (("First Part", "Chapter One"), "alpha"),
        (("First Part", "Chapter Two"), "beta"),
        (("The End",), "gamma"),
        (("Loose",), "x"),
    ]
    assert document.sections[0].first_line is None


def test_a_document_in_the_spine_twice_is_read_once(tmp_path: Path) -> None:
    path = make_epub(tmp_path / "b.epub", {"a.xhtml": "<p>once</p>"}, spine=["a.xhtml", "a.xhtml"])
    assert whole(read(path)).count("once") == 1


def test_a_missing_or_oversized_document_is_named_and_the_rest_read(tmp_path: Path) -> None:
    path = make_epub(
        tmp_path / "b.epub",
        {"a.xhtml": "<p>fine</p>", "gone.xhtml": "", "big.xhtml": "<p>" + "A" * 20_000_000},
        hrefs={"gone.xhtml": "not-there.xhtml"},
    )
    document = read(path)
    assert whole(document).strip() == "fine"
    assert [(w.code, w.where, w.message) for w in document.warnings] == [
        ("part_failed", "b.epub, OEBPS/not-there.xhtml", "is missing from the archive"),
        ("part_failed", "b.epub, OEBPS/big.xhtml", "is too large when decompressed"),
    ]


@pytest.mark.parametrize(
    ("algorithm", "target", "readable"),
    [
        ("http://www.w3.org/2001/04/xmlenc#aes256-cbc", "OEBPS/a.xhtml", False),
        ("http://www.idpf.org/2008/embedding", "OEBPS/font.otf", True),
        ("http://www.w3.org/2001/04/xmlenc#aes128-cbc", "OEBPS/font.otf", True),
    ],
)
def test_drm_is_told_from_scrambled_fonts(
    tmp_path: Path, algorithm: str, target: str, *, readable: bool
) -> None:
    encryption = (
        f'<encryption><EncryptedData><EncryptionMethod Algorithm="{algorithm}"/>'
        f'<CipherData><CipherReference URI="{target}"/></CipherData></EncryptedData></encryption>'
    )
    path = make_epub(
        tmp_path / "b.epub",
        {"a.xhtml": "<p>open</p>"},
        extra={"META-INF/encryption.xml": encryption},
    )
    if readable:
        assert "open" in whole(read(path))
    else:
        with pytest.raises(InputError, match="DRM-protected"):
            read(path)


def test_html_shows_what_a_reader_of_the_page_sees() -> None:
    flow = read_html(
        "<html><head><title>T</title><style>x</style><script>var s='<p>no</p>'</script></head>"
        "<body><nav>Home</nav><h1>A  title</h1>Some <b>bold</b>text<br>next line<script/>"
        "<ul><li>one<li>two<ol><li>deep</ol></ul><template>no</template>"
        "<table><tr><td>c1<td>c2</table><pre>  keep\n   this</pre>&amp;&nbsp;end</body></html>"
    )
    assert flow.result() == (
        "Home\n\nA title\n\nSome boldtext\nnext line\n\n- one\n- two\n  1. deep\n\n"
        "c1 | c2\n\n  keep\n   this\n\n&\xa0end\n"
    )
    assert [(h.depth, h.title) for h in flow.headings] == [(1, "A title")]


def test_marked_sections_are_text_or_nothing() -> None:
    markup = "a <![CDATA[b < c]]> d<![if !IE]> e <![endif]><![ CDQTA[x]> f<![&#0;CDATA[body> g"
    assert read_html(markup).result() == "a b < c d e f g\n"
    assert read_html("text <![CDATA[without end").result() == "text <![CDATA[without end\n"


@given(st.text(alphabet="<>/=\"'!-? abhpretdulisc&;\n[]CDATA", max_size=200))
def test_any_markup_gives_text_and_headings_inside_it(markup: str) -> None:
    flow = read_html(markup)
    text = flow.result()
    assert all(0 <= heading.start <= len(text) for heading in flow.headings)
    assert all(0 <= offset <= len(text) for offset in flow.anchors.values())


@pytest.mark.parametrize(
    ("page", "encoding"),
    [
        (b'<meta charset="windows-1252">', "windows-1252"),
        (b'<meta http-equiv=x content="text/html; charset=koi8-r">', "koi8-r"),
        (b"<?xml version='1.0' encoding='latin-1'?>", "latin-1"),
        (b"<p>none</p>", None),
    ],
)
def test_declared_encodings_are_found(page: bytes, encoding: str | None) -> None:
    assert declared_encoding(page) == encoding


def test_docx_keeps_document_order(tmp_path: Path) -> None:
    def run(text: str) -> str:
        return f"<w:r><w:t>{text}</w:t></w:r>"

    def paragraph(inner: str) -> str:
        return f"<w:p>{inner}</w:p>"

    box = f"<w:r><w:pict><w:txbxContent>{paragraph(run('in a box'))}</w:txbxContent></w:pict></w:r>"
    table = (
        f"<w:tbl><w:tr><w:tc>{paragraph(run('A1'))}</w:tc><w:tc>{paragraph(run('B1'))}</w:tc></w:tr>"
        f"<w:tr><w:tc>{paragraph(run('A2'))}</w:tc><w:tc>{paragraph('')}</w:tc></w:tr></w:tbl>"
    )
    heading = '<w:pPr><w:pStyle w:val="H"/></w:pPr>'
    body = (
        paragraph(heading + run("Terms"))
        + paragraph(
            run("We ") + f"<w:ins>{run('do ')}</w:ins><w:del>{run('not ')}</w:del>" + run("pay.")
        )
        + table
        + paragraph(run("Before") + box)
        + paragraph(run("After") + '<w:r><w:footnoteReference w:id="2"/></w:r>')
    )
    styles = '<w:style w:styleId="H"><w:name w:val="heading 1"/></w:style>'
    notes = (
        f'<w:footnote w:type="separator" w:id="0">{paragraph(run("--"))}</w:footnote>'
        f'<w:footnote w:id="2">{paragraph(run("See below."))}</w:footnote>'
    )
    path = make_docx(tmp_path / "d.docx", body, styles=styles, footnotes=notes)
    document = read(path)
    assert document.sections[0].titles == ("Terms",)
    assert whole(document).strip().split("\n") == [
        "Terms",
        "We do pay.",
        "A1 | B1",
        "A2 | ",
        "Before",
        "in a box",
        "After[footnote 2]",
        "[footnote 2] See below.",
    ]


def test_a_docx_that_is_none_or_a_bomb_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "d.docx"
    path.write_bytes(b"\xd0\xcf\x11\xe0" + bytes(600))
    with pytest.raises(InputError, match="encrypted, or in Word's old format"):
        read(path)
    path.write_bytes(b"plain text")
    with pytest.raises(InputError, match="is not a readable archive"):
        read(path)
    make_docx(path, "<w:p><w:r><w:t>" + "A" * 40_000_000 + "</w:t></w:r></w:p>")
    with pytest.raises(InputError, match="too large when decompressed"):
        read(path)


def test_xml_entities_are_refused_and_deep_nesting_too() -> None:
    for data in (
        b'<!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>',
        b'<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>',
        b"<x>" * 5000,
        b"<x>",
        b"",
    ):
        with pytest.raises(InputError):
            parse_xml(data, "x.xml")
    declared = b'<!DOCTYPE x SYSTEM "http://example.org/x.dtd"><x>a&nbsp;b</x>'
    assert parse_xml(declared, "x.xml").text() == "ab"


def test_a_notebook_gives_cells_and_text_output_without_encoded_data() -> None:
    image = base64.b64encode(bytes(range(256)) * 40).decode()
    cells = [
        {"cell_type": "markdown", "source": ["# Setup\n", f"![x](data:image/png;base64,{image})"]},
        {
            "cell_type": "code",
            "source": "print(516)",
            "outputs": [
                {"output_type": "stream", "text": ["516\n"]},
                {
                    "output_type": "display_data",
                    "data": {"image/png": image, "text/plain": ["<Figure>"]},
                },
                {"output_type": "error", "traceback": ["\x1b[31mValueError\x1b[0m: x"]},
            ],
        },
        {"cell_type": "markdown", "source": "## More\ntext"},
    ]
    parts = read_notebook(json.dumps({"nbformat": 4, "cells": cells})).parts
    assert [part.titles for part in parts] == [("Setup",), ("Setup", "More")]
    assert parts[0].text == (
        "[cell 1, markdown]\n# Setup\n![x]([encoded data left out])\n\n"
        "[cell 2, code]\nprint(516)\n\n[cell 2, output]\n516\n<Figure>\nValueError: x\n\n"
    )
    with pytest.raises(InputError, match="not a valid notebook"):
        read_notebook("[" * 100_000)
