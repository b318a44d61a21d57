"""TokenSelect's prefill, and another policy for questions and answers: where is the limit?"""

from __future__ import annotations

from collections.abc import Callable

from tsdoc.eval.policies.attending import PolicyRun
from tsdoc.eval.policies.interface import Followed, Reply
from tsdoc.eval.policies.tokenselect import TokenSelect
from tsdoc.prompt.tokenizer import Ids


class AfterTokenSelect:
    """See `Contender`: `prefilling` reads the haystack, `answering` takes its K and V."""

    def __init__(self, prefilling: TokenSelect, answering: PolicyRun) -> None:
        self._prefilling = prefilling
        self._answering = answering

    def prefill(self, ids: Ids, on_tokens: Callable[[int], None]) -> None:
        """See `Contender.prefill`."""
        self._prefilling.prefill(ids, on_tokens)
        self._answering.adopt(self._prefilling.piece, len(ids))

    def answer(self, question: Ids, max_new_tokens: int) -> Reply:
        """See `Contender.answer`."""
        return self._answering.answer(question, max_new_tokens)

    def follow(self, ids: Ids) -> Followed:
        """See `Contender.follow`."""
        return self._answering.follow(ids)
