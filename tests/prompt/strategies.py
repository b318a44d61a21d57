"""Made documents: texts with look-alike delimiters, control tokens and odd characters."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.prompt.vocabularies import CONTROL_TEXTS
from tsdoc.ingest.document import Document, Mark, PageStart, Section, SourceFile

FRAGMENTS = (
    *CONTROL_TEXTS,
    "<document name=",
    "</document>",
    "\\</document>",
    "\\\\<document >",
    "\n",
    "\r",
    "\u2028",
    "\x00",
    "\ud800",
    "\udc80",
    "e\u0301",
    "\u0301\u0327",
    "漢字",
    "😀",
    " ",
    "\t",
    "\\",
    "a",
    "<0x0A>",
    "▁",
)


def _join(parts: list[str]) -> str:
    """Surrogates stand alone, as readers leave them: two that make a pair are one character."""
    joined = "".join(parts).encode("utf-16-le", "surrogatepass")
    return joined.decode("utf-16-le", "surrogatepass")


texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), max_size=12).map(_join)


def make_document(texts: list[str], *, titles: tuple[str, ...] = ()) -> Document:
    """A document of one section per file."""
    return Document(
        name="made",
        files=tuple(_file(f"src/part{n}.txt") for n in range(len(texts))),
        sections=tuple(
            Section(file=n, titles=titles, text=text, first_line=1) for n, text in enumerate(texts)
        ),
    )


def marks(text_len: int) -> st.SearchStrategy[tuple[Mark, ...]]:
    """No marks, or some that begin at 0."""
    starts = st.none() | st.sets(st.integers(0, max(text_len - 1, 0)), max_size=3)
    return starts.map(
        lambda found: (
            ()
            if found is None
            else tuple(Mark(start=at, number=2 * n + 1) for n, at in enumerate(sorted({0, *found})))
        )
    )


@st.composite
def documents(draw: st.DrawFn) -> Document:
    """Documents of up to three files with up to three sections each, some with places in them."""
    names = draw(st.lists(texts.filter(bool), min_size=1, max_size=3, unique=True))
    sections = []
    for number in range(len(names)):
        for text in draw(st.lists(texts, min_size=1, max_size=3)):
            starts = draw(st.none() | st.sets(st.integers(0, max(len(text) - 1, 0)), max_size=3))
            pages = () if starts is None else tuple(sorted({0, *starts}))
            sections.append(
                Section(
                    file=number,
                    titles=tuple(draw(st.lists(texts, max_size=2))),
                    text=text,
                    first_line=draw(st.none() | st.integers(1, 9)),
                    pages=tuple(
                        PageStart(start=at, number=n + 1, label=draw(st.sampled_from([None, "iv"])))
                        for n, at in enumerate(pages)
                    ),
                    lines=draw(marks(len(text))),
                    cells=draw(marks(len(text))),
                )
            )
    return Document(
        name="made", files=tuple(_file(name) for name in names), sections=tuple(sections)
    )


def _file(name: str) -> SourceFile:
    return SourceFile(name=name, path=None, kind="text", num_bytes=1, sha256="0" * 64)
