"""The text of a prompt: delimited sections in order, then the table of contents.

A section is rendered from itself and its file's name alone:

    <document name="book.pdf" section="4 › 4.2 Files">
    … its text …
    </document>

A line of the text that looks like such a delimiter, with or without backslashes before it, gets one
backslash more; taking one off again gives back the original, so no text can end its own document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from tsdoc.ingest.document import Document
from tsdoc.prompt.contents import contents_text
from tsdoc.terminal import visible_line

LAYOUT_VERSION = 1
"""Part of every source record's key; raise it when the text or ids of any prompt change."""

_DELIMITER = re.compile("</?document[ >]")
# Whatever a reader, a person or a model, may take for a line end.
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A section as it stands in the prompt; offsets count characters of `text`.

    Attributes:
        text: Delimiters and escaped text.
        content_start: Where the section's own text begins.
        content_end: Where it ends.
        escapes: Offsets of the backslashes that were put in, ascending.
    """

    text: str
    content_start: int
    content_end: int
    escapes: tuple[int, ...]


def render_section(name: str, titles: tuple[str, ...], text: str) -> Rendered:
    """Renders one section; depends on nothing but its arguments."""
    head = f'<document name="{_attribute(name)}"'
    if titles:
        head += f' section="{_attribute(" › ".join(titles))}"'
    head += ">\n"
    lookalikes = _find_lookalikes(text)
    content = _insert_backslashes(text, lookalikes)
    close = "</document>\n" if content.endswith("\n") or not content else "\n</document>\n"
    return Rendered(
        text=head + content + close,
        content_start=len(head),
        content_end=len(head) + len(content),
        escapes=tuple(len(head) + at + nth for nth, at in enumerate(lookalikes)),
    )


def render_document_section(document: Document, index: int) -> Rendered:
    """Renders section number `index` of `document`."""
    section = document.sections[index]
    return render_section(document.files[section.file].name, section.titles, section.text)


def prompt_text(document: Document, *, tree_tokens: int) -> Iterator[str]:
    """Yields the text that enters the prompt: each section, then the table of contents."""
    for index in range(len(document.sections)):
        yield render_document_section(document, index).text
    contents = contents_text(document, tree_tokens=tree_tokens)
    if contents:
        yield contents


def _attribute(value: str) -> str:
    escaped = value.replace("&", "&amp;").replace('"', "&quot;")
    return visible_line(escaped.replace("<", "&lt;").replace(">", "&gt;"))


def _find_lookalikes(text: str) -> list[int]:
    """Offsets of the line starts whose line looks like a delimiter."""
    # Searching for the plain delimiter and walking back over backslashes is linear even in a text
    # of nothing but backslashes.
    found = []
    for match in _DELIMITER.finditer(text):
        at = match.start()
        while at > 0 and text[at - 1] == "\\":
            at -= 1
        if at == 0 or text[at - 1] in _LINE_ENDS:
            found.append(at)
    return found


def _insert_backslashes(text: str, offsets: list[int]) -> str:
    bounds = [0, *offsets, len(text)]
    return "\\".join(text[a:b] for a, b in pairwise(bounds))
