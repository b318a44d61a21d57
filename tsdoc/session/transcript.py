"""The text of an answer as it grows, and how whoever receives it ends the answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from tsdoc.prompt.tokenizer import TextTokenizer


class StopAnswer(Exception):  # noqa: N818 - like StopIteration, nothing is wrong
    """Raised by whoever receives an answer's text, to end the answer there."""


class Transcript:
    """The text of an answer as it grows; tokens that come again after a repair are passed over."""

    def __init__(self, tokenizer: TextTokenizer, on_text: Callable[[str], None]) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._on_text = on_text
        self._parts: list[str] = []
        self.num_tokens = 0
        self.first_token_at = 0.0

    @property
    def text(self) -> str:
        """What came so far."""
        return "".join(self._parts)

    def add(self, count: int, token: int) -> None:
        """Takes the answer's token number `count`, counted from 1."""
        if count <= self.num_tokens:
            return
        if self.num_tokens == 0:
            self.first_token_at = time.perf_counter()
        self.num_tokens = count
        piece = self._decoder.push(token)
        self._parts.append(piece)
        self._on_text(piece)
