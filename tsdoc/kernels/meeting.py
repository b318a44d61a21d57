"""How ranks find each other: a file of one machine or the store of several, gloo or NCCL."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from tsdoc.kernels.ranks import Mesh, Ranks, SoloRanks, TorchRanks, lost

FOREVER = timedelta(days=365)  # ranks wait for the next question as long as it takes


def join_ranks(meeting: Path, rank: int, tensor: int, sequence: int, device: str) -> Mesh:
    """Joins `tensor` · `sequence` ranks of this machine; returns once all have come.

    Args:
        meeting: A file, the same for all and new, by which they find each other; ranks on a CPU
            do not need it afterwards.
        rank: This process.
        tensor: Degree of the tensor axis.
        sequence: Degree of the sequence axis.
        device: "cpu" or "cuda"; on CUDA, the current device is used.

    Raises:
        RankError: the others cannot be reached.
    """
    store = FileStore(str(meeting), tensor * sequence)
    make = _make_nccl if device == "cuda" else _make_gloo_here
    return _join(store, rank, tensor, sequence, make, on_gpu=device == "cuda")


def join_hosts(store: Store, rank: int, tensor: int, sequence: int) -> Mesh:
    """Joins CPU ranks of several machines, which find each other by `store`; see `join_ranks`."""
    return _join(store, rank, tensor, sequence, _make_gloo, on_gpu=False)


def join_group(store: Store, name: str, rank: int, size: int) -> Ranks:
    """Joins one group of CPU ranks of several machines.

    Raises:
        RankError: the others cannot be reached.
    """
    return _group(PrefixStore(name, store), rank, size, _make_gloo, on_gpu=False)


_Make = Callable[[Store, int, int], Any]


def _join(
    store: Store, rank: int, tensor: int, sequence: int, make: _Make, *, on_gpu: bool
) -> Mesh:
    row, column = divmod(rank, tensor)

    def group(name: str, place: int, size: int) -> Ranks:
        return _group(PrefixStore(name, store), place, size, make, on_gpu=on_gpu)

    world = group("world", rank, tensor * sequence)
    mesh = Mesh(
        world=world,
        tensor=world if sequence == 1 else group(f"tensor {row}", column, tensor),
        sequence=world if tensor == 1 else group(f"sequence {column}", row, sequence),
    )
    world.wait()  # a rank that is connected may not have seen yet that it is
    return mesh


def _group(store: Store, rank: int, size: int, make: _Make, *, on_gpu: bool) -> Ranks:
    if size == 1:
        return SoloRanks()
    try:
        made = make(store, rank, size)
    except RuntimeError as error:
        raise lost(error) from error
    return TorchRanks(made, rank, size, on_gpu=on_gpu)


def _make_nccl(store: Store, rank: int, size: int) -> Any:
    nccl: Any = dist.ProcessGroupNCCL  # only CUDA builds have it
    settings = nccl.Options()
    settings._timeout = FOREVER
    return nccl(store, rank, size, settings)


def _make_gloo_here(store: Store, rank: int, size: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch declares few of its members
    options = gloo._Options()
    # Only this machine: nothing listens on other interfaces.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = FOREVER
    return gloo(store, rank, size, options)


def _make_gloo(store: Store, rank: int, size: int) -> Any:
    """On the interface of this machine's name, or that of gloo's own GLOO_SOCKET_IFNAME."""
    return dist.ProcessGroupGloo(store, rank, size, FOREVER)
