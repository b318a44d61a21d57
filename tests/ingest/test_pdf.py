"""PDF: text, pages, sections, and damage that is named and loses nothing else."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import pytest

from tests.ingest.making import lines, make_pdf, read, texts, whole
from tsdoc.errors import InputError, PartialInputError
from tsdoc.ingest.options import LAST_PAGE
from tsdoc.ingest.pdf import name_pages, place_outline
from tsdoc.ingest.pdf_quality import badness
from tsdoc.ingest.pdf_words import fold, join_hyphens


@pytest.fixture
def pdf(tmp_path: Path) -> Path:
    return tmp_path / "in.pdf"


def test_pages_carry_number_and_printed_label(pdf: Path) -> None:
    pdf.write_bytes(
        make_pdf(
            [lines("first"), lines("second"), lines("third")],
            labels="0<</S/r>>2<</S/D/P(A-)/St 7>>",
        )
    )
    document = read(pdf)
    (section,) = document.sections
    assert section.text == "first\nsecond\nthird\n"
    assert [(p.start, p.number, p.label) for p in section.pages] == [
        (0, 1, "i"),
        (6, 2, "ii"),
        (13, 3, "A-7"),
    ]
    assert str(document.locate(0, 15)) == "in.pdf p. 3 (printed A-7)"


def test_the_outline_cuts_sections_where_titles_stand_on_the_page(pdf: Path) -> None:
    pdf.write_bytes(
        make_pdf(
            [
                lines("Cover"),
                lines("end of the preface", "2.1 Storms at Sea", "Waves."),
                lines("Still stormy.", "About Harbours", "Calm."),
            ],
            outline=[("Storms at Sea", 1), ("about  harbours", 2), ("Not on the page", 2)],
        )
    )
    document = read(pdf)
    assert [(s.titles, s.text) for s in document.sections] == [
        ((), "Cover\nend of the preface\n"),
        (("Storms at Sea",), "2.1 Storms at Sea\nWaves.\nStill stormy.\n"),
        (("about harbours",), "About Harbours\nCalm.\n"),
    ]
    assert [[(p.start, p.number) for p in s.pages] for s in document.sections] == [
        [(0, 1), (6, 2)],
        [(0, 2), (25, 3)],
        [(0, 3)],
    ]


def test_an_entry_whose_title_is_not_found_begins_with_its_page() -> None:
    text = "one\ntwo\nthree\n"
    placed = place_outline([(1, "Zwei", 1), (2, "Drei", 2)], [1, 2, 3], [0, 4, 8, 14], text)
    assert [(h.start, h.title) for h in placed] == [(4, "Zwei"), (8, "Drei")]


def test_page_ranges_are_physical_pages(pdf: Path) -> None:
    pdf.write_bytes(
        make_pdf(
            [lines("Alpha"), lines("alpha ends"), lines("Beta"), lines("beta ends")],
            outline=[("Alpha", 0), ("Beta", 2)],
        )
    )
    document = read(pdf, pages=((2, 2), (4, 9)))
    assert [(s.titles, s.text) for s in document.sections] == [
        (("Alpha",), "alpha ends\n"),
        (("Beta",), "beta ends\n"),
    ]
    assert document.locate(1, 0).page == 4
    with pytest.raises(InputError, match=r"has 4 pages, none of those asked for \(7-8\)"):
        read(pdf, pages=((7, 8),))
    with pytest.raises(InputError, match=r"none of those asked for \(7, 9-\)"):
        read(pdf, pages=((7, 7), (9, LAST_PAGE)))


@pytest.mark.parametrize(
    ("contents", "message"),
    [([], "has no pages"), (["", ""], "holds no text that can be read: its pages are blank")],
)
def test_a_pdf_of_no_or_blank_pages_is_said(pdf: Path, contents: list[str], message: str) -> None:
    pdf.write_bytes(make_pdf(contents))
    with pytest.raises(InputError, match=message):
        read(pdf)


def test_pages_without_text_are_named_and_blank_ones_are_not(pdf: Path) -> None:
    image = (
        b"<</Length 64>>\nstream\nq 500 0 0 700 50 50 cm BI /W 1 /H 1 /BPC 8 /CS /G ID x EI Q"
        b"\nendstream"
    )
    pdf.write_bytes(make_pdf([lines("cover"), image, image, "", lines("end")]))
    document = read(pdf)
    assert [(w.code, w.where, w.message) for w in document.warnings] == [
        ("page_without_text", "in.pdf, pages 2–3", "have no text; OCR needed")
    ]
    assert [page.number for page in document.sections[0].pages] == [1, 5]
    with pytest.raises(PartialInputError, match="pages 2–3: have no text"):
        read(pdf, strict=True)


def test_a_decompression_bomb_loses_only_its_page(pdf: Path) -> None:
    packer = zlib.compressobj(9)
    once = b"".join(packer.compress(b" " * (1 << 20)) for _ in range(300)) + packer.flush()
    twice = zlib.compress(once, 9)
    bomb = b"<</Filter[/FlateDecode/FlateDecode]/Length %d>>\nstream\n%s\nendstream"
    pdf.write_bytes(make_pdf([lines("before"), bomb % (len(twice), twice), lines("after")]))
    document = read(pdf)
    assert whole(document) == "before\nafter\n"
    (warning,) = document.warnings
    assert (warning.code, warning.where) == ("page_failed", "in.pdf, page 2")
    assert "too large when decompressed" in warning.message


def test_words_are_not_glued_and_ligatures_are_folded(pdf: Path) -> None:
    moves = "BT /F1 10 Tf 72 700 Td (Reporting) Tj 48.9 0 Td (crude) Tj 29 0 Td (oil) Tj ET\n"
    spread = "BT /F1 10 Tf 72 680 Td [(C)-150(H)-150(A)-150(P)-150(T)-150(E)-150(R)] TJ ET\n"
    pdf.write_bytes(make_pdf([moves + spread]))
    assert whole(read(pdf)) == "Reporting crude oil\nCHAPTER\n"
    assert fold("o\ufb03ce \ufb01nd soft\u00adhyphen docu\u00ad\nment") == (
        "office find softhyphen document"
    )


def test_overprinted_bold_is_read_once(pdf: Path) -> None:
    bold = "".join(f"BT /F1 16 Tf {72 + 0.3 * n} 720 Td (Statement) Tj ET\n" for n in range(4))
    pdf.write_bytes(make_pdf([bold + lines("body", top=690)]))
    assert whole(read(pdf)) == "Statement\nbody\n"


def test_hyphens_at_line_ends_are_joined_only_on_evidence() -> None:
    pages = ["see the docu-\nmentation of price-\nbased rules and permit-\nted", "documentation"]
    assert join_hyphens(pages) == [
        "see the documentation of price-\nbased rules and permit-\nted",
        "documentation",
    ]
    assert join_hyphens(["a line-\nend and a line-end"]) == ["a line-end and a line-end"]


def test_a_font_without_meaning_is_not_passed_off_as_text(pdf: Path) -> None:
    glyphs = "".join(f"{ord(char) - 29:04X}" for char in "The dancers ran into the room")
    font = (
        "<</Type/Font/Subtype/Type0/BaseFont/ABCDEF+B/Encoding/Identity-H/DescendantFonts[5 0 R]>>"
    )
    descendant = (
        b"<</Type/Font/Subtype/CIDFontType2/BaseFont/ABCDEF+B/DW 500/CIDSystemInfo"
        b"<</Registry(Adobe)/Ordering(Identity)/Supplement 0>>/FontDescriptor 7 0 R>>"
    )
    descriptor = (
        b"<</Type/FontDescriptor/FontName/ABCDEF+B/Flags 4/FontBBox[0 0 1000 1000]"
        b"/ItalicAngle 0/Ascent 800/Descent -200/CapHeight 700/StemV 80>>"
    )
    content = f"BT /F1 11 Tf 72 700 Td <{glyphs}> Tj ET"
    pdf.write_bytes(make_pdf([content], font=font, streams={5: descendant, 7: descriptor}))
    document = read(pdf)
    assert whole(document) == "\ufffd\n"
    assert [warning.code for warning in document.warnings] == ["page_undecodable"]


def test_encrypted_files_open_with_an_empty_or_given_password(pdf: Path) -> None:
    import pypdf

    def encrypt(user: str) -> None:
        writer = pypdf.PdfWriter(clone_from=io.BytesIO(make_pdf([lines("secret ledger")])))
        writer.encrypt(user_password=user, owner_password="owner", algorithm="AES-256")
        with pdf.open("wb") as file:
            writer.write(file)

    encrypt("")
    document = read(pdf)
    assert whole(document) == "secret ledger\n"
    assert [warning.code for warning in document.warnings] == ["decrypted"]
    encrypt("sesame")
    with pytest.raises(InputError, match=r"is encrypted\. Give its password"):
        read(pdf)
    with pytest.raises(InputError, match="password given is wrong"):
        read(pdf, password="open")
    assert whole(read(pdf, password="sesame")) == "secret ledger\n"


def test_damage_is_repaired_and_said(pdf: Path) -> None:
    good = make_pdf([lines("still here")])
    without_table = good[: good.index(b"xref")] + good[good.index(b"trailer") :]
    for data in (
        without_table[: without_table.rindex(b"startxref")],
        good[: good.rindex(b"startxref")] + b"startxref\n41\n%%EOF\n",
    ):
        pdf.write_bytes(data)
        document = read(pdf)
        assert whole(document) == "still here\n"
        assert [warning.code for warning in document.warnings] == ["repaired"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<!doctype html><p>Sign in</p>", "is not a PDF"),
        (b"%PDF-1.5\nnothing more", "is damaged"),
        (make_pdf([""]), "holds no text"),
    ],
)
def test_what_is_no_readable_pdf_is_one_clear_error(pdf: Path, data: bytes, message: str) -> None:
    pdf.write_bytes(data)
    with pytest.raises(InputError, match=message):
        read(pdf)


def test_badness_sees_glued_words_and_lost_letters() -> None:
    good = "The quick brown fox jumps over the lazy dog. " * 4
    assert badness(good) == 0
    assert badness(good + "Donaudampfschifffahrtsgesellschaft") == 0
    assert badness(good.replace(" ", "")) > 0.02
    assert badness(good + "\ue000\ue001\ue002") > 0.02
    assert badness(" \n") == float("inf")


def test_runs_of_pages_are_named_briefly() -> None:
    assert name_pages([4]) == "page 4"
    assert name_pages([2, 3]) == "pages 2–3"
    assert name_pages([1, 4, 5, 6, 9]) == "pages 1, 4–6, 9"


def test_several_files_share_one_reader_process(tmp_path: Path) -> None:
    for name in ("a.pdf", "b.pdf", "c.pdf"):
        (tmp_path / name).write_bytes(make_pdf([lines(name)]))
    assert texts(read(tmp_path)) == {name: f"{name}\n" for name in ("a.pdf", "b.pdf", "c.pdf")}


def column(rows: list[str], left: int) -> list[str]:
    """Returns one content stream per line of a column."""
    return [
        f"BT /F1 10 Tf {left} {700 - 14 * number} Td ({row}) Tj ET\n"
        for number, row in enumerate(rows)
    ]


TITLE = "BT /F1 16 Tf 120 740 Td (A title that runs across both of the columns) Tj ET\n"
FOOT = "BT /F1 8 Tf 250 60 Td (a footer, in the very middle) Tj ET\n"
LEFT = [f"left line {number} of the first column" for number in range(9)]
RIGHT = [f"right line {number} of the second one" for number in range(9)]


@pytest.mark.parametrize("drawn", ["by column", "by line"])
def test_two_columns_are_read_one_after_the_other(pdf: Path, drawn: str) -> None:
    left, right = column(LEFT, 72), column(RIGHT, 320)
    rows = (
        left + right
        if drawn == "by column"
        else [r for pair in zip(left, right, strict=True) for r in pair]
    )
    pdf.write_bytes(make_pdf([TITLE + "".join(rows) + FOOT]))
    title, foot = (stream.split("(")[1].split(")")[0] for stream in (TITLE, FOOT))
    assert whole(read(pdf)).split("\n")[:-1] == [title, *LEFT, *RIGHT, foot]


def test_rows_of_a_table_stay_together(pdf: Path) -> None:
    names = [f"part {number}" for number in range(9)]
    prices = [f"{number}.50 euro each" for number in range(9)]
    rows = [r for pair in zip(column(names, 72), column(prices, 320), strict=True) for r in pair]
    pdf.write_bytes(make_pdf(["".join(rows)]))
    assert whole(read(pdf)).split("\n")[:-1] == [
        f"{a} {b}" for a, b in zip(names, prices, strict=True)
    ]


def test_a_page_of_digits_alone_is_read(pdf: Path) -> None:
    pdf.write_bytes(make_pdf([lines("2024"), lines("a page")]))
    document = read(pdf)
    assert (whole(document), document.warnings) == ("2024\na page\n", ())


CRASHING = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from tsdoc.ingest import pdf_pdfium, pdf_pypdf, worker_main

def crash_on_the_third_page(reader):
    text = reader.text
    def crashing(self, index):
        if index == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        return text(self, index)
    reader.text = crashing

crash_on_the_third_page(pdf_pdfium.PdfiumFile)
crash_on_the_third_page(pdf_pypdf.PypdfFile)
worker_main.main()
"""


def test_a_crash_of_a_reader_names_its_page_and_loses_nothing_else(
    pdf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsdoc.ingest.worker._START", CRASHING)
    pdf.write_bytes(make_pdf([lines(f"page number {n}") for n in range(1, 6)]))
    (tmp_path / "next.html").write_text("<p>another file")
    document = read(pdf, tmp_path / "next.html")
    assert whole(document).split("\n")[:-2] == [f"page number {n}" for n in (1, 2, 4, 5)] + [
        "another file"
    ]
    assert [(w.code, w.where) for w in document.warnings] == [("page_failed", "in.pdf, page 3")]
    assert "crashed the reader (SIGSEGV)" in document.warnings[0].message
    assert document.locate(0, whole(document).index("number 4")).page == 4
