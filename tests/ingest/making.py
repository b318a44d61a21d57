"""Small input files made on the spot: PDFs, EPUBs, DOCX, repositories."""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tsdoc.ingest.document import Document
from tsdoc.ingest.options import IngestOptions
from tsdoc.ingest.sources import read_sources

HELVETICA = "<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>"


def read(*sources: Path | str, **options: object) -> Document:
    """Reads sources with the given options."""
    return read_sources([str(source) for source in sources], IngestOptions(**options))  # type: ignore[arg-type]


def texts(document: Document) -> dict[str, str]:
    """Returns the text of each file of a document."""
    found: dict[str, str] = {file.name: "" for file in document.files}
    for section in document.sections:
        found[document.files[section.file].name] += section.text
    return found


def whole(document: Document) -> str:
    """Returns all text of a document."""
    return "".join(section.text for section in document.sections)


def lines(*rows: str, top: int = 720) -> str:
    """Returns a content stream with lines of text."""
    return "".join(
        f"BT /F1 11 Tf 72 {top - 16 * n} Td ({row}) Tj ET\n" for n, row in enumerate(rows)
    )


def make_pdf(
    contents: Sequence[str | bytes],
    *,
    outline: Sequence[tuple[str, int]] = (),
    labels: str = "",
    font: str = HELVETICA,
    streams: Mapping[int, bytes] | None = None,
) -> bytes:
    """Returns a PDF with one content stream per page.

    Args:
        contents: Content streams; bytes are whole stream objects.
        outline: (title, page index) entries.
        labels: The /Nums of the page labels.
        font: Object 3.
        streams: More objects by number.
    """
    objects: dict[int, bytes] = {3: font.encode(), **(streams or {})}
    kids = []
    for index, content in enumerate(contents):
        page, stream = 100 + 2 * index, 101 + 2 * index
        kids.append(f"{page} 0 R")
        objects[page] = (
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]"
            f"/Resources<</Font<</F1 3 0 R>>>>/Contents {stream} 0 R>>"
        ).encode()
        if isinstance(content, str):
            body = content.encode("latin-1")
            content = b"<</Length %d>>\nstream\n%s\nendstream" % (len(body), body)
        objects[stream] = content
    objects[2] = f"<</Type/Pages/Kids[{' '.join(kids)}]/Count {len(kids)}>>".encode()
    more = f"/PageLabels<</Nums[{labels}]>>" if labels else ""
    if outline:
        more += "/Outlines 10 0 R"
        objects[10] = b"<</Type/Outlines/First 11 0 R/Last %d 0 R>>" % (10 + len(outline))
        for number, (title, index) in enumerate(outline, 11):
            following = f"/Next {number + 1} 0 R" if number < 10 + len(outline) else ""
            objects[number] = (
                f"<</Title({title})/Parent 10 0 R/Dest[{100 + 2 * index} 0 R/Fit]{following}>>"
            ).encode()
    objects[1] = f"<</Type/Catalog/Pages 2 0 R{more}>>".encode()
    return _assemble(objects)


def _assemble(objects: Mapping[int, bytes]) -> bytes:
    data = bytearray(b"%PDF-1.5\n")
    offsets = {}
    for number in sorted(objects):
        offsets[number] = len(data)
        data += b"%d 0 obj\n%s\nendobj\n" % (number, objects[number])
    table, size = len(data), max(objects) + 1
    data += b"xref\n0 %d\n0000000000 65535 f \n" % size
    for number in range(1, size):
        offset = offsets.get(number)
        data += b"0000000000 00000 f \n" if offset is None else b"%010d 00000 n \n" % offset
    data += b"trailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (size, table)
    return bytes(data)


def make_epub(
    path: Path,
    documents: Mapping[str, str | bytes],
    *,
    spine: Sequence[str] | None = None,
    hrefs: Mapping[str, str] | None = None,
    ncx: str = "",
    extra: Mapping[str, str] | None = None,
) -> Path:
    """Writes an EPUB; `documents` maps member names to whole files or the inside of a body."""
    hrefs = hrefs or {}
    items = "".join(
        f'<item id="{name}" href="{hrefs.get(name, name)}" media-type="application/xhtml+xml"/>'
        for name in documents
    )
    references = "".join(f'<itemref idref="{name}"/>' for name in spine or documents)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mimetype", "application/epub+zip", zipfile.ZIP_STORED)
        archive.writestr(
            "META-INF/container.xml",
            '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
            '<rootfile full-path="OEBPS/content.opf"/></rootfiles></container>',
        )
        archive.writestr(
            "OEBPS/content.opf",
            '<package xmlns="http://www.idpf.org/2007/opf"><manifest>'
            '<item id="ncx" href="toc.ncx" media-type="application/x-dtbncx+xml"/>'
            f"{items}</manifest><spine>{references}</spine></package>",
        )
        archive.writestr(
            "OEBPS/toc.ncx",
            f'<ncx xmlns="http://www.daisy.org/z3986/2005/ncx/"><navMap>{ncx}</navMap></ncx>',
        )
        for name, body in documents.items():
            page = f"<html><body>{body}</body></html>" if isinstance(body, str) else body
            archive.writestr(f"OEBPS/{name}", page)
        for name, content in (extra or {}).items():
            archive.writestr(name, content)
    return path


def nav_point(title: str, target: str, inner: str = "") -> str:
    """Returns an NCX entry."""
    return (
        f"<navPoint><navLabel><text>{title}</text></navLabel>"
        f'<content src="{target}"/>{inner}</navPoint>'
    )


def make_docx(path: Path, body: str, **parts: str) -> Path:
    """Writes a DOCX from the inside of `w:body`; `parts` are further files under word/."""
    opening = (
        '<w:{0} xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main">{1}</w:{0}>'
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", "<Types/>")
        inner = f"<w:body>{body}</w:body>"
        archive.writestr("word/document.xml", opening.format("document", inner))
        for name, content in parts.items():
            archive.writestr(f"word/{name}.xml", opening.format(name, content))
    return path


def make_tree(root: Path, files: Mapping[str, str | bytes], *, git: bool = False) -> Path:
    """Writes files below `root`, with `git` as a fresh repository."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    if git:
        run_git(root, "init", "-q", "--template=")
    return root


def run_git(folder: Path, *arguments: str) -> bytes:
    """Runs git in a folder and returns what it prints."""
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True
    )
    return done.stdout
