"""Tasks on threads of their own: results in order, torch's threads shared out, errors raised."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from tsdoc.kernels.workers import Workers


def test_results_come_in_the_order_of_the_tasks_and_each_uses_one_thread() -> None:
    before = torch.get_num_threads()
    workers = Workers(3)

    names: set[str] = set()

    def task(number: int) -> tuple[int, int]:
        names.add(threading.current_thread().name)
        threading.Event().wait(0.01 * (5 - number))
        return number, torch.get_num_threads()

    assert workers.run([partial(task, n) for n in range(5)]) == [(n, 1) for n in range(5)]
    assert torch.get_num_threads() == before
    assert len(names) == 3


def test_the_caller_takes_what_nobody_has_begun() -> None:
    """Whatever the only other thread is busy with."""
    workers = Workers(2)
    later = threading.Event()

    def wait(number: int) -> int:
        assert later.wait(60)
        return number

    def tell(number: int) -> int:
        later.set()
        return number

    assert workers.run([partial(int, 0), partial(wait, 1), partial(tell, 2)]) == [0, 1, 2]


def test_fewer_tasks_than_threads_share_them_out() -> None:
    before = torch.get_num_threads()
    assert Workers(4).run([torch.get_num_threads] * 2) == [2, 2]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_first_error_is_raised_when_nothing_runs_any_more(num_threads: int) -> None:
    running: list[int] = []

    def task(number: int) -> None:
        running.append(number)
        threading.Event().wait(0.02)
        running.remove(number)
        if number == 1:
            raise ValueError(f"task {number}")

    with pytest.raises(ValueError, match="task 1"):
        Workers(num_threads).run([partial(task, n) for n in range(6)])
    assert not running


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_numbers_are_shared_out_with_what_each_core_has(num_threads: int, count: int) -> None:
    own: list[list[int]] = [[] for _ in range(num_threads)]
    Workers(num_threads).share_out(count, lambda number, mine: mine.append(number), own)
    assert [number for mine in own for number in mine] == list(range(count))
    assert max(map(len, own)) == -(-count // num_threads)


def test_tasks_run_in_inference_mode_where_their_caller_does() -> None:
    tasks = [torch.is_inference_mode_enabled] * 3
    workers = Workers(2)
    assert workers.run(tasks) == [False] * 3
    with torch.inference_mode():
        assert workers.run(tasks) == [True] * 3


@pytest.mark.parametrize("length", [1, 11, 12, 13, 100, 1000, 4096])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_a_range_is_split_for_all_threads(length: int, num_threads: int) -> None:
    parts = Workers(num_threads).split(length, 512, 12)
    assert [at for part in parts for at in range(part.start, part.stop)] == list(range(length))
    assert all(part.start % 512 % 12 == 0 and part.stop - part.start <= 512 for part in parts)
    assert len(parts) >= min(num_threads, length // 24) * 3 // 4


def test_the_caller_uses_one_core_while_it_leads() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), Workers(2).leading():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before
