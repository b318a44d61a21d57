"""DOCX, in the reader process: paragraphs, tables and text boxes in document order.

Insertions are part of the text, deletions are not, as Word shows a document. One message:
`{"text", "headings": [{"start", "depth", "title"}], "anchors": {}}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tsdoc.errors import InputError
from tsdoc.ingest.archive import Archive
from tsdoc.ingest.frames import Begin, Message
from tsdoc.ingest.options import Limits
from tsdoc.ingest.xml_tree import Node, parse_xml

_BODY = "word/document.xml"
_OLE = b"\xd0\xcf\x11\xe0"
_LEFT_OUT = frozenset(
    {"del", "moveFrom", "Fallback", "pPr", "rPr", "instrText", "delText", "sdtPr"}
)
_HEADING_NAME = re.compile(r"heading ([1-9])", re.IGNORECASE)


@dataclass(slots=True)
class _Block:
    """A paragraph or table: its lines, and the depth of the heading it is, or 0."""

    text: str
    depth: int = 0


def read_docx(request: Message, begin: Begin) -> Iterator[Message]:
    """Reads a DOCX; see the module for the message.

    Raises:
        InputError: no DOCX, encrypted, damaged, or too large when decompressed.
    """
    begin("the document", 0)
    path = Path(request["path"])
    with path.open("rb") as file:
        if file.read(4) == _OLE:
            raise InputError(
                "is encrypted, or in Word's old format", hint="Save it as a .docx without password."
            )
    archive = Archive(path, Limits(**request["limits"]))
    if _BODY not in archive:
        raise InputError("is not a DOCX (it has no word/document.xml)")
    data = archive.read(_BODY)
    begin("the document", len(data))
    reader = _Reader(_heading_styles(archive))
    blocks = reader.blocks(parse_xml(data, _BODY))
    for name in ("footnotes", "endnotes"):
        member = f"word/{name}.xml"
        if member in archive:
            blocks.extend(reader.notes(parse_xml(archive.read(member), member), name))
    text: list[str] = []
    headings: list[Message] = []
    at = 0
    for block in blocks:
        if block.depth and block.text.strip():
            title = " ".join(block.text.split())
            headings.append({"start": at, "depth": block.depth, "title": title})
        text.append(block.text + "\n")
        at += len(block.text) + 1
    yield {"text": "".join(text), "headings": headings, "anchors": {}}


def _heading_styles(archive: Archive) -> dict[str, int]:
    """Returns style id → heading depth."""
    if "word/styles.xml" not in archive:
        return {}
    depths: dict[str, int] = {}
    for style in parse_xml(archive.read("word/styles.xml"), "word/styles.xml").find("style"):
        key = style.attributes.get("styleId", "")
        for child in style.elements():
            value = child.attributes.get("val", "")
            named = _HEADING_NAME.fullmatch(value) if child.name == "name" else None
            if named is not None:
                depths[key] = int(named[1])
            elif child.name == "name" and value.lower() == "title":
                depths[key] = 1
        for level in style.find("outlineLvl"):
            depths.setdefault(key, _level(level))
    return {key: depth for key, depth in depths.items() if 1 <= depth <= 9}


def _level(node: Node) -> int:
    value = node.attributes.get("val", "")
    return int(value) + 1 if value.isdigit() else 0


class _Reader:
    def __init__(self, styles: dict[str, int]) -> None:
        self._styles = styles

    def blocks(self, parent: Node) -> list[_Block]:
        """Returns the blocks below an element, in document order."""
        found: list[_Block] = []
        for node in parent.elements():
            if node.name == "p":
                found.extend(self._paragraph(node))
            elif node.name == "tbl":
                found.append(_Block(self._table(node)))
            elif node.name not in _LEFT_OUT:
                found.extend(self.blocks(node))
        return found

    def notes(self, root: Node, kind: str) -> list[_Block]:
        """Returns foot- or endnotes, each marked as its reference is."""
        found = []
        for note in root.elements():
            text = " ".join(block.text for block in self.blocks(note)).strip()
            if text and "type" not in note.attributes:
                found.append(_Block(f"[{kind[:-1]} {note.attributes.get('id', '')}] {text}"))
        return found

    def _paragraph(self, node: Node) -> list[_Block]:
        boxes: list[_Block] = []
        text = "".join(self._inline(node, boxes))
        depth = 0
        for properties in (child for child in node.elements() if child.name == "pPr"):
            for child in properties.elements():
                if child.name == "pStyle":
                    depth = depth or self._styles.get(child.attributes.get("val", ""), 0)
                elif child.name == "outlineLvl":
                    depth = _level(child) if _level(child) <= 9 else depth
                elif child.name == "numPr" and text.strip():
                    text = f"- {text}"
        return [_Block(text.removeprefix("- ") if depth else text, depth), *boxes]

    def _inline(self, parent: Node, boxes: list[_Block]) -> Iterator[str]:
        """Yields the text of runs; the content of text boxes goes to `boxes`."""
        for node in parent.elements():
            if node.name == "t":
                yield "".join(item for item in node.content if isinstance(item, str))
            elif node.name == "tab":
                yield "\t"
            elif node.name in ("br", "cr"):
                yield "\n"
            elif node.name == "noBreakHyphen":
                yield "-"
            elif node.name in ("footnoteReference", "endnoteReference"):
                yield f"[{node.name.removesuffix('Reference')} {node.attributes.get('id', '')}]"
            elif node.name == "txbxContent":
                boxes.extend(self.blocks(node))
            elif node.name not in _LEFT_OUT:
                yield from self._inline(node, boxes)

    def _table(self, table: Node) -> str:
        rows = []
        for row in _below(table, "tr"):
            cells = [
                " ".join(" ".join(b.text for b in self.blocks(cell)).split())
                for cell in _below(row, "tc")
            ]
            rows.append(" | ".join(cells))
        return "\n".join(rows)


def _below(parent: Node, name: str) -> Iterator[Node]:
    """Yields rows or cells, also those inside of content controls and insertions."""
    for node in parent.elements():
        if node.name == name:
            yield node
        elif node.name in ("sdt", "sdtContent", "ins", "customXml", "moveTo"):
            yield from _below(node, name)
