"""Answers that say the same over and over.

Greedy small models fall into loops: a stretch of tokens that is repeated, token by token, until the
answer's length ends it. Four copies behind one another, and at least so many tokens of them as no
table or list repeats by chance, are taken for one.
"""

from __future__ import annotations

MAX_PERIOD = 256  # tokens of a stretch, at most
MIN_COPIES = 4
MIN_TOKENS = 64  # of all copies together
SHOWN_TOKENS = 16  # of copies are shown at least, and one copy, before more are held back


class Loops:
    """Watches the tokens of one answer.

    Attributes:
        found: Whether the answer has fallen into a loop.
    """

    def __init__(self) -> None:
        self.found = False
        self._tokens: list[int] = []
        self._matches = [0] * (MAX_PERIOD + 1)  # how many last tokens equal those a period before

    def add(self, token: int) -> int:
        """Takes the next token; returns how many of the last ones only repeat what was said twice.

        They are worth showing once the answer goes on with something else.
        """
        num_repeated = 0
        for period in range(1, min(len(self._tokens), MAX_PERIOD) + 1):
            if self._tokens[-period] != token:
                self._matches[period] = 0
                continue
            self._matches[period] += 1
            matches = self._matches[period]
            num_repeated = max(num_repeated, matches - _num_shown(period))
            if matches + period >= max(MIN_COPIES * period, MIN_TOKENS):
                self.found = True
        self._tokens.append(token)
        return num_repeated


def _num_shown(period: int) -> int:
    """Tokens of whole copies that are shown behind the first."""
    return -(-SHOWN_TOKENS // period) * period
