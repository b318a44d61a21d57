"""Ranks as threads of one process: the arithmetic of many ranks without starting any process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from tsdoc.kernels.ranks import Mesh, Ranks, SoloRanks

WAIT_S = 60.0


class Room:
    """What the threads of one group share.

    Args:
        size: How many threads there are.
        turn: Held by the one thread of all groups that computes: Triton's interpreter knows one.
    """

    def __init__(self, size: int, turn: threading.Lock) -> None:
        self.slots: list[torch.Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self._turn = turn

    def meet(self) -> None:
        """Returns once all threads have come here."""
        self._turn.release()
        try:
            self.barrier.wait()
        finally:
            self._turn.acquire()


class ThreadRanks:
    """See `tsdoc.kernels.ranks.Ranks`."""

    def __init__(self, room: Room, rank: int) -> None:
        self.rank = rank
        self.size = len(room.slots)
        self._room = room

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self._room.slots[self.rank] = x.clone()
        self._room.meet()
        out = torch.stack([slot for slot in self._room.slots if slot is not None])
        self._room.meet()
        return out

    def start_sum(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        total = self.gather(x).sum(dim=0)
        return lambda: x.copy_(total)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return self.start_sum(x)()

    def sum_share(self, x: torch.Tensor) -> torch.Tensor:
        return self.gather(x).sum(dim=0).chunk(self.size)[self.rank]

    def sum_at_first(self, x: torch.Tensor) -> None:
        total = self.gather(x).sum(dim=0)
        if self.rank == 0:
            x.copy_(total)
        else:
            x.fill_(7)  # nobody may use it

    def from_first(self, x: torch.Tensor) -> None:
        x.copy_(self.gather(x)[0])

    def wait(self) -> None:
        self._room.meet()


def run_ranks(tensor: int, sequence: int, work: Callable[[Mesh], Any]) -> list[Any]:
    """Runs `work` once per rank, all at the same time, and returns what each one returned."""
    size = tensor * sequence
    turn = threading.Lock()
    world = Room(size, turn)
    rows = [Room(tensor, turn) for _ in range(sequence)]
    columns = [Room(sequence, turn) for _ in range(tensor)]
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def group(room: Room, rank: int) -> Ranks:
        return ThreadRanks(room, rank) if len(room.slots) > 1 else SoloRanks()

    def run(rank: int) -> None:
        row, column = divmod(rank, tensor)
        mesh = Mesh(
            world=group(world, rank),
            tensor=group(rows[row], column),
            sequence=group(columns[column], row),
        )
        try:
            with turn:
                results[rank] = work(mesh)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            errors.append(error)
            for room in [world, *rows, *columns]:
                room.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0]
        )
    return results
