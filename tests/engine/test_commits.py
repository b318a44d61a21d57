"""Blocks are reported in order, behind the computation, and errors reach it."""

from __future__ import annotations

import threading

import pytest

from tsdoc.engine.commits import Commits
from tsdoc.errors import ResourceError


class Arriving:
    """A block that arrives when it is let."""

    def __init__(self, arrived: bool = True) -> None:
        self.event = threading.Event()
        self.abandoned = False
        if arrived:
            self.event.set()

    def wait(self) -> None:
        assert self.event.wait(10)

    def abandon(self) -> None:
        self.abandoned = True
        self.event.set()


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_every_block_is_reported_in_order(ahead: int) -> None:
    ends: list[int] = []
    with Commits(ends.append, ahead) as commits:
        for end in range(1, 20):
            commits.add(end, Arriving())
            assert len(ends) >= end - ahead
        commits.finish()
    assert ends == list(range(1, 20))


def test_a_block_is_computed_while_the_last_one_is_kept() -> None:
    started, may_go_on = threading.Event(), threading.Event()
    ends: list[int] = []

    def keep(end: int) -> None:
        started.set()
        assert may_go_on.wait(10)
        ends.append(end)

    with Commits(keep, 1) as commits:
        commits.add(1, Arriving())
        assert started.wait(10)
        assert ends == []  # the computation is not held up
        may_go_on.set()
        commits.finish()
    assert ends == [1]


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_keeping_raises_stops_the_prefill(ahead: int) -> None:
    def keep(end: int) -> None:
        raise ResourceError("disk full")

    with pytest.raises(ResourceError, match="disk full"), Commits(keep, ahead) as commits:
        for end in range(1, 5):
            commits.add(end, Arriving())
        commits.finish()


def test_nothing_is_kept_behind_a_block_that_could_not_be_kept() -> None:
    third_is_queued = threading.Event()
    kept: list[int] = []

    def keep(end: int) -> None:
        assert third_is_queued.wait(10)
        if end == 2:
            raise ResourceError("disk full")
        kept.append(end)

    with pytest.raises(ResourceError, match="disk full"), Commits(keep, 3) as commits:
        for end in range(1, 4):
            commits.add(end, Arriving())
        third_is_queued.set()
        commits.finish()
    assert kept == [1]


def test_an_interrupted_prefill_finishes_the_block_that_is_being_kept_and_no_other() -> None:
    started, may_go_on = threading.Event(), threading.Event()
    ends: list[int] = []

    def keep(end: int) -> None:
        started.set()
        assert may_go_on.wait(10)
        ends.append(end)

    blocks = [Arriving(), Arriving()]
    with pytest.raises(KeyboardInterrupt), Commits(keep, 2) as commits:
        for end, block in enumerate(blocks, 1):
            commits.add(end, block)
        assert started.wait(10)
        threading.Timer(0.1, may_go_on.set).start()
        raise KeyboardInterrupt
    assert ends == [1]
    assert blocks[1].abandoned
