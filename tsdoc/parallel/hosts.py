"""Ranks that torchrun has started, on one machine or several: finding, telling and following.

They find each other by torchrun's own variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Rank
0 runs the command; every other one waits for its job, and for what rank 0 announces, which comes
through a process group of its own. Whoever ends breaks the connections of all.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.rendezvous import rendezvous

from tsdoc.errors import RankError, UsageError
from tsdoc.kernels.meeting import FOREVER, join_group, join_hosts
from tsdoc.kernels.ranks import Ranks
from tsdoc.parallel.job import Job, load_shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

JOB = "tsdoc/job"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Hosts:
    """See `Others`: ranks 1 … size - 1, started by torchrun.

    Args:
        job: What they work on.

    Raises:
        UsageError: torchrun has not started this process, or another number of them.
        RankError: they cannot be reached.
    """

    def __init__(self, job: Job) -> None:
        self._is_lost = False
        store, _, size = _find(job.size)
        store.set(JOB, job.to_json())
        self._orders = join_group(store, "orders", 0, size)
        self.mesh = join_hosts(store, 0, job.tensor, job.sequence)

    def has_lost(self) -> bool:
        """See `Others.has_lost`: known of ranks that could not be reached."""
        return self._is_lost

    def why(self) -> RankError:
        """See `Others.why`."""
        self._is_lost = True
        return RankError(
            "another rank ended or cannot be reached",
            hint="What was prefilled is kept; start torchrun again on all machines to go on.",
        )

    def send(self, message: Any) -> None:
        """See `Others.send`."""
        try:
            _send(self._orders, json.dumps(message, default=int).encode())
        except RankError as error:
            raise self.why() from error

    def close(self) -> None:
        """See `Others.close`: they end once they are told."""
        if not self._is_lost:
            _send(self._orders, b"")
            self._is_lost = True

    def end(self) -> None:
        """See `Others.end`: they end with this process, which breaks their connections."""
        self._is_lost = True


def follow_hosts() -> None:
    """Follows rank 0 until it ends; for every other process that torchrun has started.

    Raises:
        RankError: another rank ended or cannot be reached.
        UsageError: torchrun has not started this process.
    """
    from tsdoc.parallel.follower import Follower

    store, rank, _ = _find(None)
    try:
        text = store.get(JOB)
    except RuntimeError as error:
        raise RankError("rank 0 ended or cannot be reached") from error
    if not text:
        return
    job = Job.from_json(text.decode())
    orders = join_group(store, "orders", rank, job.size)
    mesh = join_hosts(store, rank, job.tensor, job.sequence)
    follower = Follower(load_shard(job, mesh), mesh)
    while message := _receive(orders):
        follower.do(json.loads(message))


def dismiss_hosts() -> None:
    """Lets ranks end that were never given a job."""
    with contextlib.suppress(RankError, RuntimeError):  # torchrun is ending already
        store, _, _ = _find(None)
        if not store.check([JOB]):
            store.set(JOB, "")


def rank_here() -> int:
    """This process among those that torchrun has started.

    Raises:
        UsageError: it has not started this one.
    """
    if any(name not in os.environ for name in VARIABLES):
        raise UsageError(
            "torchrun has not started this process",
            hint="torchrun --nnodes 2 … -m tsdoc.hosts ask SOURCE QUESTION --parallel 2",
        )
    return int(os.environ["RANK"])


def _find(expected: int | None) -> tuple[Store, int, int]:
    """The store by which all find each other, this rank, and how many there are."""
    rank = rank_here()
    size = int(os.environ["WORLD_SIZE"])
    if expected is not None and size != expected:
        raise UsageError(
            f"torchrun has started {size} processes and the settings ask for {expected}",
            hint="nnodes x nproc-per-node must be tensor x sequence.",
        )
    try:
        store, _, _ = next(rendezvous("env://", timeout=FOREVER))
    except RuntimeError as error:
        raise RankError(f"the other ranks cannot be found ({error})") from error
    return store, rank, size


def _send(orders: Ranks, text: bytes) -> None:
    orders.from_first(torch.tensor([len(text)]))
    if text:
        orders.from_first(torch.frombuffer(bytearray(text), dtype=torch.uint8))


def _receive(orders: Ranks) -> bytes:
    """What rank 0 sends next; nothing at the end."""
    length = torch.zeros(1, dtype=torch.int64)
    orders.from_first(length)
    text = torch.empty(int(length), dtype=torch.uint8)
    if len(text):
        orders.from_first(text)
    return text.numpy().tobytes()
