"""Ranks: the processes that compute one answer together, and what they say to each other.

`SoloRanks` is a group of one, which does nothing; `TorchRanks` is a process group of torch's, gloo
on CPUs and NCCL on GPUs. Every rank of a group makes the same calls in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from tsdoc.errors import RankError


class Ranks(Protocol):
    """A group of processes.

    Attributes:
        rank: This process, from 0.
        size: How many there are.
    """

    rank: int
    size: int

    def start_sum(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins to add up `x` over all ranks, in place; the result is called for its end.

        Returns:
            Waits, and returns the sum: the same bits on every rank.
        """

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Adds up `x` over all ranks, in place, and returns it: the same bits on every rank."""

    def sum_share(self, x: torch.Tensor) -> torch.Tensor:
        """Adds up `x` [size · n, …] over all ranks; returns the n rows of the sum of this rank."""

    def sum_at_first(self, x: torch.Tensor) -> None:
        """Adds up `x` over all ranks, in place on rank 0; elsewhere it is left in any state.

        Each number is added up in the order of ranks, wherever it stands: what is alike on every
        rank stays alike in the sum, to the bit.
        """

    def from_first(self, x: torch.Tensor) -> None:
        """Gives `x` of rank 0 to all ranks, in place."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [size, *x.shape], what all ranks have, in the order of ranks."""

    def wait(self) -> None:
        """Returns once every rank has come here."""


class SoloRanks:
    """A group of one."""

    rank = 0
    size = 1

    def start_sum(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See `Ranks.start_sum`."""
        return lambda: x

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks.sum`."""
        return x

    def sum_share(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks.sum_share`."""
        return x

    def sum_at_first(self, x: torch.Tensor) -> None:
        """See `Ranks.sum_at_first`."""

    def from_first(self, x: torch.Tensor) -> None:
        """See `Ranks.from_first`."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks.gather`."""
        return x.unsqueeze(0)

    def wait(self) -> None:
        """See `Ranks.wait`."""


class TorchRanks:
    """See `Ranks`: a process group.

    Args:
        group: Gloo for tensors in memory, NCCL for those on a GPU.
        rank: This process.
        size: How many there are.
        on_gpu: Whether it is NCCL's.
    """

    def __init__(self, group: Any, rank: int, size: int, *, on_gpu: bool) -> None:
        self._group = group
        self._on_gpu = on_gpu
        self.rank = rank
        self.size = size

    def start_sum(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See `Ranks.start_sum`; on a CPU, small types are added up in float32."""
        return self._begin_sum(x, dist.AllreduceOptions())

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks.sum`."""
        return self._begin_sum(x, _in_line(dist.AllreduceOptions()))()

    def _begin_sum(self, x: torch.Tensor, options: Any) -> Callable[[], torch.Tensor]:
        wide = x.float() if x.itemsize == 2 and not x.is_cuda else x.contiguous()
        wait = self._start(lambda: self._group.allreduce([wide], options))

        def finish() -> torch.Tensor:
            wait()
            return x if wide is x else x.copy_(wide)

        return finish

    def sum_share(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks.sum_share`."""
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        options = _in_line(ReduceScatterOptions())
        self._start(lambda: self._group._reduce_scatter_base(out, x.contiguous(), options))()
        return out

    def sum_at_first(self, x: torch.Tensor) -> None:
        """See `Ranks.sum_at_first`.

        Gloo's own sum goes round in a ring, which begins elsewhere for every part of `x`.
        """
        if self.rank > 0:
            self._start(lambda: self._group.send([x], 0, 0))()
            return
        part = torch.empty_like(x)
        for rank in range(1, self.size):
            self._start(partial(self._group.recv, [part], rank, 0))()
            x += part

    def from_first(self, x: torch.Tensor) -> None:
        """See `Ranks.from_first`."""
        self._start(lambda: self._group.broadcast([x]))()

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks.gather`."""
        out = x.new_empty(self.size, *x.shape)
        options = _in_line(AllgatherOptions())
        flat = out.view(-1)
        own = x.contiguous().view(-1)
        self._start(lambda: self._group._allgather_base(flat, own, options))()
        return out

    def wait(self) -> None:
        """See `Ranks.wait`."""
        options = dist.BarrierOptions()
        if self._on_gpu:
            options.device_ids = [torch.cuda.current_device()]
        self._start(lambda: self._group.barrier(options))()

    def abort(self) -> None:
        """Ends what waits for a rank on a GPU; gloo notices by itself that one has ended.

        What was begun ends at once. The rest is left to a thread of its own: it waits for graphs
        that hold collectives, and those for whoever waits here.
        """
        if self._on_gpu:
            threading.Thread(target=self._group.abort, name="tsdoc-abort", daemon=True).start()

    def replace(self, other: TorchRanks) -> None:
        """Goes on in the process group of `other`, of the same rank and size."""
        self._group = other._group

    def _start(self, begin: Callable[[], Any]) -> Callable[[], None]:
        try:
            work = begin()
        except RuntimeError as error:
            raise lost(error) from error

        def wait() -> None:
            try:
                if work is not None:  # what runs in line may have nothing to wait for
                    work.wait()
            except RuntimeError as error:
                raise lost(error) from error

        return wait


def _in_line(options: Any) -> Any:
    """Options of what is waited for at once: on a GPU, it goes on the stream that it is part of."""
    options.asyncOp = False
    return options


def lost(error: RuntimeError) -> RankError:
    """What becomes of a process group's complaint: all but always, another rank has ended."""
    return RankError(f"a rank cannot be reached ({str(error).splitlines()[0][:120]})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks on two axes: rank = sequence index · tensor degree + tensor index.

    Attributes:
        world: All ranks.
        tensor: Those that hold other heads of the same tokens.
        sequence: Those that hold other tokens of the same heads.
    """

    world: Ranks
    tensor: Ranks
    sequence: Ranks

    def abort(self) -> None:
        """A rank has ended: nobody waits for it any more."""
        for ranks in {self.world, self.tensor, self.sequence}:
            if isinstance(ranks, TorchRanks):
                ranks.abort()

    def replace(self, other: Mesh) -> None:
        """Goes on in the process groups of `other`, of the same shape and the same rank."""
        for own, new in (
            (self.world, other.world),
            (self.tensor, other.tensor),
            (self.sequence, other.sequence),
        ):
            if isinstance(own, TorchRanks) and isinstance(new, TorchRanks):
                own.replace(new)


SOLO = Mesh(world=SoloRanks(), tensor=SoloRanks(), sequence=SoloRanks())
"""The mesh of one rank."""
