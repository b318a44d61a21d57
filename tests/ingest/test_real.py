"""Spot checks on real documents, where they lie beside the repository."""

from __future__ import annotations

import html
import re
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tests.ingest.making import make_docx, read, whole
from tsdoc.ingest.document import Document

REAL = Path(__file__).resolve().parents[3] / "shared" / "real"
pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason="the real documents are not here")


def find(document: Document, needle: str, after: str = "") -> str:
    """Returns where a needle stands, by `Place`, with its innermost title."""
    for number, section in enumerate(document.sections):
        at = section.text.find(needle)
        if at >= 0 and (not after or after in section.titles):
            place = document.locate(number, at)
            return f"{place} {place.titles[-1] if place.titles else '-'}"
    return "nowhere"


@pytest.mark.parametrize("name", ["debian-faq", "debian-policy"])
def test_no_words_are_lost_where_another_reader_glues_them(name: str) -> None:
    import pypdfium2

    path = REAL / "pdf" / f"{name}.pdf"
    raw = pypdfium2.PdfDocument(path)
    other: Counter[str] = Counter()
    for page in raw:
        text = page.get_textpage().get_text_range().replace("\ufffe", "")
        other.update(re.findall(r"\w+", text))
    raw.close()
    ours = Counter(re.findall(r"\w+", whole(read(path))))
    assert (ours & other).total() >= 0.99 * other.total()


def test_ligatures_are_plain_letters() -> None:
    text = whole(read(REAL / "pdf" / "docbook-xsl-reference.pdf"))
    assert not re.search("[\ufb00-\ufb06]", text)
    assert "configuration" in text or "specified" in text


def test_places_in_a_pdf_with_outline_and_roman_labels() -> None:
    document = read(REAL / "pdf" / "debian-faq.pdf")
    assert document.warnings == ()
    assert find(
        document, "On what hardware architectures/systems does", "Compatibility issues"
    ) == (
        "debian-faq.pdf p. 21 (printed 13) "
        "On what hardware architectures/systems does Debian GNU/Linux run?"
    )


def test_places_in_a_pdf_without_outline() -> None:
    document = read(REAL / "pdf" / "fhs-3.0.pdf")
    assert find(document, "/root : Home directory for the root user\n(optional)").startswith(
        "fhs-3.0.pdf p. 21 (printed 14)"
    )


def test_every_spine_item_of_an_epub_is_read_once() -> None:
    path = REAL / "epub" / "live-manual.en.epub"
    text = " ".join(whole(read(path)).split())
    with zipfile.ZipFile(path) as archive:
        pages = [n for n in archive.namelist() if n.endswith(".xhtml")]
        for name in pages:
            body = archive.read(name).decode().partition("<body")[2].partition(">")[2]
            runs = re.findall(r">([A-Za-z ,]{20,})", " ".join(body.split()))
            longest = max(runs, key=len, default="").strip()
            assert longest in text or not longest, name
    assert text.count("This manual serves as a single access point") == 1


def test_an_epub_has_as_many_words_as_its_spine() -> None:
    path = REAL / "epub" / "live-manual.en.epub"
    with zipfile.ZipFile(path) as archive:
        package = next(name for name in archive.namelist() if name.endswith(".opf"))
        text = archive.read(package).decode()
        hrefs = dict(re.findall(r'<item id="([^"]+)"[^>]*? href="([^"#]+)', text))
        hrefs |= {b: a for a, b in re.findall(r'<item href="([^"#]+)[^>]*? id="([^"]+)"', text)}
        spine = re.findall(r'<itemref[^>]*? ?idref="([^"]+)"', text)
        assert len(spine) == 190
        folder = package.rpartition("/")[0]
        members = dict.fromkeys(f"{folder}/{hrefs[name]}".lstrip("/") for name in spine)
        expected = sum(
            len(re.findall(r"\w+", visible_words(archive.read(member).decode())))
            for member in members
        )
    found = len(re.findall(r"\w+", whole(read(path))))
    assert abs(found - expected) <= 0.002 * expected


def visible_words(page: str) -> str:
    body = page.partition("<body")[2].partition(">")[2]
    return html.unescape(re.sub(r"<[^>]*>", " ", body))


@pytest.mark.parametrize(
    ("name", "needle"),
    [
        ("pdf/debian-policy.pdf", "This manual describes the policy requirements"),
        ("pdf/R-lang.pdf", "R is a system for statistical computation and graphics"),
        ("pdf/docbook-xsl-reference.pdf", "admon.graphics"),
    ],
)
def test_pages_are_those_that_another_reader_finds(name: str, needle: str) -> None:
    import pypdfium2

    words = needle.split()
    raw = pypdfium2.PdfDocument(REAL / name)
    pages = [
        number
        for number, page in enumerate(raw, 1)
        if needle in " ".join(page.get_textpage().get_text_range().split())
    ]
    raw.close()
    document = read(REAL / name)
    found = set()
    for number, section in enumerate(document.sections):
        for match in re.finditer(r"\s+".join(map(re.escape, words)), section.text):
            page = document.locate(number, match.start()).page
            assert page is not None
            found.add(page)
    assert sorted(found) == pages
    assert pages


def test_a_novel_in_epub_keeps_its_stories() -> None:
    document = read(REAL / "epub" / "sherlock-holmes.epub")
    assert any("A Scandal in Bohemia" in section.titles for section in document.sections)
    assert whole(document).count("To Sherlock Holmes she is always") == 1


def test_a_novel_in_plain_text_knows_chapter_and_line() -> None:
    path = REAL / "txt" / "northanger-abbey.txt"
    document = read(path)
    assert whole(document) == path.read_text("utf-8")
    assert find(document, "No one who had ever seen Catherine Morland") == (
        "northanger-abbey.txt:31 CHAPTER 1"
    )


def test_a_folder_of_mixed_documents_is_six_sources(tmp_path: Path) -> None:
    for name in ("fhs-3.0", "R-lang", "debian-faq"):
        (tmp_path / f"{name}.pdf").write_bytes((REAL / "pdf" / f"{name}.pdf").read_bytes())
    epub = (REAL / "epub" / "live-manual.en.epub").read_bytes()
    (tmp_path / "manual.epub").write_bytes(epub)
    make_docx(tmp_path / "c.docx", "<w:p><w:r><w:t>Contract</w:t></w:r></w:p>")
    (tmp_path / "README").write_text("Read me.\n")
    document = read(tmp_path)
    assert [file.kind for file in document.files] == ["pdf", "text", "docx", "pdf", "pdf", "epub"]
    assert document.warnings == ()
