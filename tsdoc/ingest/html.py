"""HTML and XHTML to running text, as a reader of the page sees it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

from tsdoc.ingest.decode import decode
from tsdoc.ingest.flow import Flow
from tsdoc.ingest.frames import Begin, Message

_HIDDEN = frozenset({"script", "style", "template", "noscript", "head", "iframe", "object", "svg"})
_SPACED = frozenset({"p", "pre", "table", "ul", "ol", "dl", "blockquote", "figure", "hr"})
_BLOCKS = _SPACED | {
    *("address", "article", "aside", "body", "caption", "dd", "details", "dialog", "div", "dt"),
    *("fieldset", "figcaption", "footer", "form", "header", "html", "legend", "li", "main", "nav"),
    *("option", "section", "select", "summary", "tbody", "tfoot", "thead", "tr"),
}
_HEADINGS = {"h1": 1, "h2": 2, "h3": 3, "h4": 4, "h5": 5, "h6": 6}
# XHTML allows an empty element to close itself; to an HTML parser the rest would be its content.
_SELF_CLOSED = re.compile(
    r"<(script|style|title|textarea|iframe|noscript|template|object|svg|head|a|p|div|span)"
    r"(\s[^<>]*)?/>",
    re.IGNORECASE,
)
_DECLARED = re.compile(
    rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([-\w.:]+)|<\?xml[^>]{0,100}encoding=["']([-\w.]+)""",
    re.IGNORECASE,
)


def declared_encoding(data: bytes) -> str | None:
    """Returns the encoding that a page declares in its first bytes."""
    found = _DECLARED.search(data[:4096])
    return None if found is None else (found[1] or found[2]).decode("ascii")


def read_page(request: Message, begin: Begin) -> Iterator[Message]:
    """Reads an HTML file, in the reader process.

    Its one message is `{"text", "headings": [{"start", "depth", "title"}], "anchors", "lines"}`;
    the last are (offset in the text, line of the file) wherever the line changes.
    """
    data = Path(request["path"]).read_bytes()
    begin("the page", len(data))
    yield page_message(data)


def page_message(data: bytes) -> Message:
    """Returns the text, headings, anchors and lines of a page's bytes."""
    flow = read_html(decode(data, declared=declared_encoding(data)).text)
    text = flow.result()
    headings = [asdict(heading) for heading in flow.headings]
    return {"text": text, "headings": headings, "anchors": flow.anchors, "lines": flow.lines}


def read_html(text: str) -> Flow:
    """Returns the visible text of a page with its headings and anchors."""
    page = _Page()
    page.feed(_SELF_CLOSED.sub(r"<\1\2></\1>", text))
    page.close()
    return page.flow


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.flow = Flow()
        self._hidden: list[str] = []
        self._lists: list[int | None] = []
        self._pre = 0
        self._cells = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._hidden:
            if tag == self._hidden[0]:
                self._hidden.append(tag)
            elif tag == "body":  # a head that was never closed
                self._hidden.clear()
            else:
                return
        elif tag in _HIDDEN:
            self._hidden.append(tag)
        if self._hidden:
            return
        given = dict(attrs)
        for name in (given.get("id"), given.get("name") if tag == "a" else None):
            if name:
                self.flow.anchor(name)
        self.flow.line = self.getpos()[0]
        self._start(tag, given)

    def handle_endtag(self, tag: str) -> None:
        if self._hidden:
            if tag == self._hidden[-1]:
                self._hidden.pop()
            return
        if tag in _HEADINGS:
            self.flow.end_heading()
        elif tag in _BLOCKS:
            self.flow.block(1 if tag in _SPACED and not self._lists[:-1] else 0)
        if tag == "pre":
            self._pre = max(0, self._pre - 1)
        elif tag in ("ul", "ol") and self._lists:
            self._lists.pop()

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        add = self.flow.add_exactly if self._pre else self.flow.add
        first = self.getpos()[0]
        # Line ends alone count as such, as in `getpos`: no form feed, no U+2028.
        for number, line in enumerate(re.findall(r"[^\n]*\n|[^\n]+", data)):
            self.flow.line = first + number
            add(line)

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        """Reads `<![` at `i`: CDATA is text, as in XHTML; all else a comment, as in browsers."""
        is_text = self.rawdata.startswith("<![CDATA[", i)
        end = "]]>" if is_text else ">"
        at = self.rawdata.find(end, i)
        if at >= 0 and is_text:
            self.handle_data(self.rawdata[i + len("<![CDATA[") : at])
        return -1 if at < 0 else at + len(end)

    def _start(self, tag: str, given: dict[str, str | None]) -> None:
        if tag in _HEADINGS:
            self.flow.start_heading(_HEADINGS[tag])
        elif tag in _BLOCKS:
            self.flow.block(1 if tag in _SPACED and not self._lists else 0)
        if tag == "br":
            self.flow.line_break()
        elif tag == "pre":
            self._pre += 1
        elif tag in ("ul", "ol"):
            self._lists.append(1 if tag == "ol" else None)
        elif tag == "li":
            self._mark_item()
        elif tag == "tr":
            self._cells = 0
        elif tag in ("td", "th"):
            self._cells += 1
            self.flow.add(" | " if self._cells > 1 else " ")
        elif tag == "img" and (given.get("alt") or "").strip():
            self.flow.add(f"[{given['alt']}]")

    def _mark_item(self) -> None:
        if not self._lists:
            return
        number = self._lists[-1]
        indent = "  " * (len(self._lists) - 1)
        self.flow.add_exactly(indent + ("- " if number is None else f"{number}. "))
        if number is not None:
            self._lists[-1] = number + 1
