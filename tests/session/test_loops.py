"""When an answer is a loop, and what of it is held back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsdoc.session.loops import MAX_PERIOD, MIN_COPIES, MIN_TOKENS, SHOWN_TOKENS, Loops

BEGIN = list(range(1000, 1007))


def watch(tokens: Sequence[int]) -> tuple[int | None, int]:
    """Returns after how many tokens a loop is found, and how many have been shown by then."""
    loops, shown = Loops(), 0
    for count, token in enumerate(tokens, 1):
        held = loops.add(token)
        # Nothing that was shown is held back later, and at most what is new is shown.
        assert shown <= count - held <= count
        shown = count - held
        if loops.found:
            return count, shown
    return None, shown


def is_loop(tokens: Sequence[int]) -> bool:
    """Says the same of the end of `tokens`, slowly."""
    for period in range(1, MAX_PERIOD + 1):
        length = max(MIN_COPIES * period, MIN_TOKENS)
        end = tokens[-length:]
        if len(end) == length and end[period:] == end[:-period]:
            return True
    return False


@pytest.mark.parametrize("period", [1, 2, 3, 10, 15, 16, 17, 40, 100, MAX_PERIOD])
def test_a_loop_ends_at_the_fourth_copy_and_two_are_shown(period: int) -> None:
    stretch = list(range(period))
    found, shown = watch(BEGIN + stretch * 100)
    assert found == len(BEGIN) + max(MIN_COPIES * period, MIN_TOKENS)
    behind_first = shown - len(BEGIN) - period
    assert behind_first % period == 0
    assert SHOWN_TOKENS <= behind_first < SHOWN_TOKENS + period


@pytest.mark.parametrize(
    "tokens",
    [
        list(range(20)) * 3,
        list(range(20)) * 3 + list(range(19)),
        [7] * (MIN_TOKENS - 1),
        [1, 2] * (MIN_TOKENS // 2 - 1),
        list(range(MAX_PERIOD + 1)) * 6,
        # Lines of a table that differ in one number.
        [token for n in range(50) for token in (1, 2, 3, 1000 + n, 4, 5, 6)],
    ],
)
def test_what_merely_resembles_a_loop_is_none(tokens: list[int]) -> None:
    assert watch(BEGIN + tokens + BEGIN) == (None, len(BEGIN + tokens + BEGIN))


def test_a_loop_that_changes_its_stretch_is_shown_until_then() -> None:
    tokens = [*(list(range(20)) * 3), *range(5), *(list(range(100, 130)) * 3), 7]
    assert watch(tokens) == (None, len(tokens))


@given(
    pieces=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 9)),
        max_size=8,
    )
)
def test_loops_are_found_exactly_where_four_copies_end(
    pieces: list[tuple[list[int], int]],
) -> None:
    tokens = [token for stretch, copies in pieces for token in stretch * copies]
    expected = next((end for end in range(1, len(tokens) + 1) if is_loop(tokens[:end])), None)
    assert watch(tokens)[0] == expected


def test_noise_is_no_loop() -> None:
    chance = random.Random(3)
    tokens = [chance.randrange(3) for _ in range(3000)]
    assert watch(tokens)[0] is None
