"""Threads that each run whole operations on a core of their own.

Torch shares every single operation out among its threads. Where there are many like operations, as
over the chunks of a prefill block, it is faster to give each thread whole ones: none waits for the
others after every step, and what torch does on one core alone (gathering, top-k) uses all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")
M = TypeVar("M")


class Workers:
    """Runs tasks on as many threads as torch uses when this is made.

    Args:
        num_threads: Cores to use; None is as many as torch uses.

    Attributes:
        num_threads: Cores in use.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or torch.get_num_threads()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Runs all tasks and returns their results in order.

        The calling thread takes those that no other has begun, so that short ones need not wait
        for a thread to wake up. Torch's threads are shared out among the tasks that run at a time.
        Returns, or raises what a failing task raised, only when no task is running any
        more: what they write to may then be given back.
        """
        if self.num_threads == 1 or len(tasks) < 2:
            return [task() for task in tasks]
        if self._pool is None:
            num_others = self.num_threads - 1
            self._pool = ThreadPoolExecutor(num_others, thread_name_prefix="tsdoc-cpu")
        each = max(1, self.num_threads // len(tasks))
        inference = torch.is_inference_mode_enabled()
        before = torch.get_num_threads()
        futures: list[Future[T]] = []
        try:
            futures += [self._pool.submit(_run, task, each, inference) for task in tasks[1:]]
            done = {0: _run(tasks[0], each, inference)}
            for number, future in enumerate(futures, 1):
                if future.cancel():
                    done[number] = _run(tasks[number], each, inference)
            others = [n for n in range(len(tasks)) if n not in done]
            done |= {n: futures[n - 1].result() for n in others}
            return [done[n] for n in range(len(tasks))]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
            torch.set_num_threads(before)

    def share_out(self, count: int, work: Callable[[int, M], None], own: Sequence[M]) -> None:
        """Does `work` for numbers below `count`, as many consecutive ones on each core.

        Args:
            count: How many there are.
            work: Gets a number, and what the core that it runs on has of its own.
            own: Of each core.
        """
        each = max(1, -(-count // self.num_threads))
        shares = [range(at, min(at + each, count)) for at in range(0, count, each)]
        with self.leading():
            self.run(
                [partial(_work_on, share, work, o) for share, o in zip(shares, own, strict=False)]
            )

    @contextmanager
    def leading(self) -> Iterator[None]:
        """While entered, what the calling thread does itself uses one core.

        Torch's own threads go on spinning for milliseconds after each operation that they share,
        and would be in the way of those here.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def split(self, length: int, size: int, unit: int) -> list[slice]:
        """Splits [0, length) at multiples of `size`; if that is too few, those at `unit` again."""
        starts = range(0, length, size)
        each = -(-self.num_threads // max(len(starts), 1))
        step = -(-min(size, length) // (each * unit)) * unit
        parts = []
        for start in starts:
            end = min(start + size, length)
            parts += [slice(at, min(at + step, end)) for at in range(start, end, step)]
        return parts


def _work_on(share: range, work: Callable[[int, M], None], own: M) -> None:
    for number in share:
        work(number, own)


def _run(task: Callable[[], T], num_threads: int, inference: bool) -> T:
    if torch.get_num_threads() != num_threads:  # of this thread: others keep theirs
        torch.set_num_threads(num_threads)
    with torch.inference_mode(inference):
        return task()
