"""Process groups over gloo: ranks find each other, and say the same to all."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tsdoc.kernels import meeting
from tsdoc.kernels.meeting import join_ranks
from tsdoc.kernels.ranks import Mesh
from tsdoc.kernels.shards import shard_groups


def meet(path: Path, tensor: int, sequence: int, work: Callable[[Mesh], Any]) -> list[Any]:
    def join(rank: int) -> Any:
        return work(join_ranks(path, rank, tensor, sequence, "cpu"))

    with ThreadPoolExecutor(tensor * sequence) as pool:
        return list(pool.map(join, range(tensor * sequence)))


def test_what_ranks_say_to_each_other(tmp_path: Path) -> None:
    def work(mesh: Mesh) -> tuple[Any, ...]:
        world, rank = mesh.world, mesh.world.rank
        own = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]) * (rank + 1)
        small = torch.full((2,), float(rank), dtype=torch.bfloat16)
        transposed = torch.arange(6.0).view(2, 3).T + rank
        first = torch.tensor([rank + 7])
        world.from_first(first)
        return (
            world.sum_share(own).tolist(),
            world.gather(transposed).tolist(),
            world.sum(small).tolist(),
            first.tolist(),
        )

    found = meet(tmp_path / "meeting", 3, 1, work)
    gathered = [(torch.arange(6.0).view(2, 3).T + rank).tolist() for rank in range(3)]
    for rank, (share, parts, total, first) in enumerate(found):
        assert share == [[6.0 * (2 * rank + 1), 6.0 * (2 * rank + 2)]]
        assert parts == gathered
        assert total == [3.0, 3.0]
        assert first == [7]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_ties_on_every_rank_ties_in_the_sum(size: int, tmp_path: Path) -> None:
    """Else a tie at the boundary of a selection would not go to the lower index."""
    kinds = torch.rand(size, 7, generator=torch.Generator().manual_seed(1))

    def work(mesh: Mesh) -> torch.Tensor:
        votes = kinds[mesh.world.rank].repeat(1000)
        mesh.world.sum_at_first(votes)
        return votes

    total = meet(tmp_path / "meeting", size, 1, work)[0].view(1000, 7)
    assert (total == total[0]).all()
    torch.testing.assert_close(total[0], kinds.sum(dim=0))


def test_nobody_has_met_before_all_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first to come away removes the file, which a later one may still have to read.
    make, ready = meeting._make_gloo_here, {}

    def make_slowly(store: Any, rank: int, size: int) -> Any:
        group = make(store, rank, size)
        if rank == 1:
            time.sleep(0.4)
            ready["at"] = time.monotonic()
        return group

    monkeypatch.setattr(meeting, "_make_gloo_here", make_slowly)
    joined = meet(tmp_path / "meeting", 2, 1, lambda mesh: time.monotonic())
    assert min(joined) >= ready["at"]


@pytest.mark.parametrize(
    ("heads", "kv", "size", "expected"),
    [
        (28, 4, 2, [(0, 14), (14, 28)]),
        (9, 3, 2, [(0, 6), (6, 9)]),
        (28, 4, 3, [(0, 14), (14, 21), (21, 28)]),
        (14, 2, 4, [(0, 4), (4, 7), (7, 11), (11, 14)]),
        (64, 8, 4, [(0, 16), (16, 32), (32, 48), (48, 64)]),
    ],
)
def test_groups_are_never_padded(
    heads: int, kv: int, size: int, expected: list[tuple[int, int]]
) -> None:
    shards = [shard_groups(heads, kv, rank, size) for rank in range(size)]
    assert [(shard.first, shard.last) for shard in shards] == expected
    assert all(shard.is_even for shard in shards)
    owned = [head for shard in shards for head in range(*shard.owned)]
    assert owned == list(range(kv))
    assert shards[0].replicates == (size > kv)


@pytest.mark.parametrize("size", [3, 5, 16])
def test_groups_that_cannot_be_split(size: int) -> None:
    with pytest.raises(ValueError, match=f"2 KV heads cannot be split evenly over {size} ranks"):
        shard_groups(14, 2, 0, size)
