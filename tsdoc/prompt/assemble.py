"""Builds a prompt: the ids of the template's head, the sections and the contents, and their map."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tsdoc.ingest.document import Document
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.prompt.contents import contents_text
from tsdoc.prompt.layout import render_document_section
from tsdoc.prompt.tokenizer import Ids, TextTokenizer
from tsdoc.prompt.tokenmap import MapArrays, TokenMap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """Everything that comes before a question.

    Attributes:
        ids: int32 [num_tokens]: the template's head, each section, the contents.
        map: From positions in `ids` to the document.
    """

    ids: Ids
    map: TokenMap

    @property
    def head_len(self) -> int:
        """Number of tokens of the template's head."""
        return int(self.map.arrays.section_tokens[0])

    @property
    def contents_start(self) -> int:
        """Position after the last section, where the contents begin."""
        return int(self.map.arrays.section_tokens[-1])


def build_prompt(
    document: Document,
    tokenizer: TextTokenizer,
    template: ChatTemplate,
    *,
    tree_tokens: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> Prompt:
    """Tokenises a document and lays it out.

    Args:
        document: What was read.
        tokenizer: The model's tokenizer.
        template: The model's chat template.
        tree_tokens: About how many tokens the contents may take; 0 leaves them out.
        on_progress: Told now and then the characters done and their total.
    """
    total = sum(len(section.text) for section in document.sections)
    frames: list[_Frame] = []

    def on_chars(done: int) -> None:
        if on_progress is not None:
            on_progress(min(done, total), total)  # delimiters are not in the total

    encoded = list(tokenizer.encode_many(_texts(document, frames), on_chars))
    contents, _ = tokenizer.encode(contents_text(document, tree_tokens=tree_tokens))
    head = template.head_ids
    section_ids = [ids for ids, _ in encoded]
    return Prompt(
        ids=np.concatenate([head, *section_ids, contents]),
        map=TokenMap(document, _arrays(head.size, frames, encoded)),
    )


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the map needs of a rendered section; its text would double the memory held."""

    content: tuple[int, int]
    escapes: npt.NDArray[np.int64]


def _texts(document: Document, frames: list[_Frame]) -> Iterator[str]:
    """Renders the sections one after the other, and notes the frame of each."""
    for index in range(len(document.sections)):
        section = render_document_section(document, index)
        frames.append(
            _Frame(
                (section.content_start, section.content_end),
                np.array(section.escapes, dtype=np.int64),
            )
        )
        yield section.text


def _arrays(head_len: int, frames: list[_Frame], encoded: list[tuple[Ids, Ids]]) -> MapArrays:
    content = [frame.content for frame in frames]
    return MapArrays(
        section_tokens=_bounds([head_len, *(ids.size for ids, _ in encoded)])[1:],
        char_start=np.concatenate([np.zeros(0, np.int32), *(starts for _, starts in encoded)]),
        content=np.array(content, dtype=np.int64).reshape(-1, 2),
        escapes=np.concatenate([np.zeros(0, np.int64), *(frame.escapes for frame in frames)]),
        escape_bounds=_bounds([frame.escapes.size for frame in frames]),
    )


def _bounds(sizes: list[int]) -> npt.NDArray[np.int64]:
    """Running totals, from 0."""
    return np.cumsum([0, *sizes], dtype=np.int64)
