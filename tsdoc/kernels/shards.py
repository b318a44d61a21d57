"""Which heads, and which tokens' K and V, a rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShard:
    """Consecutive query heads, and the KV heads that they read.

    Where a range of query heads cuts a group, its KV head is held by both ranks; the first of them
    is the one that writes it to memory they share. Kernels want as many query heads for each KV
    head: a rank whose groups differ fills the shorter ones with heads of zeros (`pad`, `real`).

    Attributes:
        first: First query head.
        last: Query head after the last.
        group: Query heads per KV head of the model.
        num_qo_heads: Query heads of the model.
        replicates: Whether any KV head of the model is held by two ranks.
    """

    first: int
    last: int
    group: int
    num_qo_heads: int
    replicates: bool

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self.last - self.first

    @property
    def kv(self) -> tuple[int, int]:
        """KV heads [first, last) that are read."""
        return self.first // self.group, (self.last - 1) // self.group + 1

    @property
    def owned(self) -> tuple[int, int]:
        """KV heads [first, last) that this rank writes to memory shared by all."""
        return -(-self.first // self.group), self.kv[1]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank."""
        first, last = self.kv
        return last - first

    @property
    def kv_of_head(self) -> list[int]:
        """For each query head its KV head, counted from this rank's first."""
        return [head // self.group - self.kv[0] for head in range(self.first, self.last)]

    @property
    def width(self) -> int:
        """Query heads per KV head once padded."""
        kv_of_head = self.kv_of_head
        return max(kv_of_head.count(kv) for kv in range(self.num_kv_heads))

    @property
    def is_even(self) -> bool:
        """Whether nothing has to be padded."""
        return self.width * self.num_kv_heads == self.num_heads

    def places(self) -> list[int]:
        """Where each query head stands among the padded ones."""
        seen = [0] * self.num_kv_heads
        found = []
        for kv in self.kv_of_head:
            found.append(kv * self.width + seen[kv])
            seen[kv] += 1
        return found

    def pad(self, q: torch.Tensor) -> torch.Tensor:
        """Query heads [n, num_heads, head_dim] with zeros where a group is short."""
        if self.is_even:
            return q
        out = q.new_zeros(q.shape[0], self.width * self.num_kv_heads, q.shape[2])
        out[:, self.places()] = q
        return out

    def real(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Leaves out the padding of dimension `dim`."""
        if self.is_even:
            return x
        return x.index_select(dim, torch.tensor(self.places(), device=x.device))


def shard_heads(num_qo_heads: int, num_kv_heads: int, rank: int, size: int) -> HeadShard:
    """Splits query heads into `size` ranges whose lengths differ by one at most.

    Raises:
        ValueError: there are fewer query heads than ranks.
    """
    if size > num_qo_heads:
        raise ValueError(f"{num_qo_heads} query heads cannot be split over {size} ranks")
    group = num_qo_heads // num_kv_heads
    edges = [spread(num_qo_heads, at, size)[0] for at in range(size)]
    first, last = spread(num_qo_heads, rank, size)
    return HeadShard(
        first=first,
        last=last,
        group=group,
        num_qo_heads=num_qo_heads,
        replicates=any(edge % group for edge in edges),
    )


def shard_groups(num_qo_heads: int, num_kv_heads: int, rank: int, size: int) -> HeadShard:
    """Splits query heads into `size` ranges, none of which has to be padded.

    A rank has whole groups, or, where there are more ranks than KV heads, a part of one group.

    Raises:
        ValueError: there are more ranks than KV heads and no multiple of them, or more than heads.
    """
    group = num_qo_heads // num_kv_heads
    each = size // num_kv_heads
    if size <= num_kv_heads:
        first, last = (group * kv for kv in spread(num_kv_heads, rank, size))
    elif size % num_kv_heads or each > group:
        raise ValueError(f"{num_kv_heads} KV heads cannot be split evenly over {size} ranks")
    else:
        kv, part = divmod(rank, each)
        first, last = (group * kv + head for head in spread(group, part, each))
    return HeadShard(
        first=first,
        last=last,
        group=group,
        num_qo_heads=num_qo_heads,
        replicates=size > num_kv_heads,
    )


def spread(count: int, rank: int, size: int) -> tuple[int, int]:
    """Rank's share [first, last) of `count` things; the first ranks have one more where needed."""
    each, more = divmod(count, size)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)
