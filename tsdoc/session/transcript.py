"""The text of an answer as it grows, and how whoever receives it ends the answer."""

from __future__ import annotations

import time
from collections.abc import Callable

from tsdoc.prompt.tokenizer import TextTokenizer
from tsdoc.session.loops import Loops
from tsdoc.session.sentences import sentence_end


class StopAnswer(Exception):  # noqa: N818 - like StopIteration, nothing is wrong
    """Raised by whoever receives an answer's text, to end the answer there."""


class Transcript:
    """The text of an answer as it grows; tokens that come again after a repair are passed over.

    Args:
        tokenizer: Turns tokens into text.
        on_text: Receives it.
        stop_loops: Holds repetitions back until they end, and leaves them out if they are a loop.

    Attributes:
        num_tokens: The first so many tokens are the answer; more may be held back.
        first_token_at: Seconds of `time.perf_counter`.
    """

    def __init__(
        self, tokenizer: TextTokenizer, on_text: Callable[[str], None], *, stop_loops: bool
    ) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._on_text = on_text
        self._loops = Loops() if stop_loops else None
        self._pieces: list[str] = []
        self.num_tokens = 0
        self.first_token_at = 0.0

    @property
    def text(self) -> str:
        """What came so far."""
        return "".join(self._pieces[: self.num_tokens])

    @property
    def looped(self) -> bool:
        """Whether the answer says the same over and over; it should be ended."""
        return self._loops is not None and self._loops.found

    def add(self, count: int, token: int) -> None:
        """Takes the answer's token number `count`, counted from 1."""
        if count <= len(self._pieces):
            return
        if not self._pieces:
            self.first_token_at = time.perf_counter()
        self._pieces.append(self._decoder.push(token))
        num_held = self._loops.add(token) if self._loops is not None else 0
        self._show(count - num_held)

    def finish(self) -> None:
        """The answer is over: what was held back is part of it; of a loop, the sentence begun."""
        self._show(self._end_of_sentence() if self.looped else len(self._pieces))

    def _end_of_sentence(self) -> int:
        """Number of tokens with which the last sentence shown is whole, where it ever is."""
        rest = self.text
        while (end := sentence_end(rest)) is not None:
            rest = rest[end:]
        end = sentence_end(rest + "".join(self._pieces[self.num_tokens :]))
        missing = 0 if end is None else end - len(rest)
        num_tokens = self.num_tokens
        while missing > 0:
            missing -= len(self._pieces[num_tokens])
            num_tokens += 1
        return num_tokens

    def _show(self, num_tokens: int) -> None:
        shown = self.num_tokens
        if num_tokens > shown:
            self.num_tokens = num_tokens
            self._on_text("".join(self._pieces[shown:num_tokens]))
