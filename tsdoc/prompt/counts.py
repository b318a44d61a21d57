"""Token counts per section, exact or estimated, for `tsdoc tokens` and for limits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tsdoc.ingest.document import Document
from tsdoc.prompt.assemble import Prompt
from tsdoc.prompt.estimate import estimate_tokens
from tsdoc.prompt.layout import prompt_text
from tsdoc.prompt.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens of a document's sections (delimiters included) and of its contents.

    Attributes:
        sections: One count per section, in document order.
        contents: Tokens of the table of contents.
        exact: False where they were estimated without a tokenizer.
    """

    sections: tuple[int, ...]
    contents: int
    exact: bool

    @property
    def total(self) -> int:
        """All tokens of the document and its contents."""
        return sum(self.sections) + self.contents

    def per_file(self, document: Document) -> tuple[int, ...]:
        """Returns one count per file, in document order."""
        totals = [0] * len(document.files)
        for section, count in zip(document.sections, self.sections, strict=True):
            totals[section.file] += count
        return tuple(totals)


def count_tokens(
    document: Document, tokenizer: TextTokenizer | None, *, tree_tokens: int
) -> TokenCounts:
    """Counts the tokens that a document will be in a prompt; estimates them without a tokenizer."""
    texts = prompt_text(document, tree_tokens=tree_tokens)
    if tokenizer is None:
        counts = [estimate_tokens(text) for text in texts]
    else:
        counts = [int(ids.size) for ids, _ in tokenizer.encode_many(texts)]
    num_sections = len(document.sections)
    return TokenCounts(
        sections=tuple(counts[:num_sections]),
        contents=sum(counts[num_sections:]),
        exact=tokenizer is not None,
    )


def prompt_counts(prompt: Prompt) -> TokenCounts:
    """Returns the counts of a prompt that is already built."""
    lengths = np.diff(prompt.map.arrays.section_tokens)
    return TokenCounts(
        sections=tuple(int(length) for length in lengths),
        contents=int(prompt.ids.size) - prompt.contents_start,
        exact=True,
    )
