"""What the kernels need to know of a block's chunks, brought to the device once per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tsdoc.kernels.interface import Ranges
from tsdoc.kernels.selection import ChunkRange, SelectionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """Consecutive chunks and what each selects from.

    Attributes:
        ranges: One per chunk.
        counts: Per chunk, how many positions are selected.
        num_before: Per chunk, rows attended before it.
        meta: [num_chunks, 4] int32: init_end, local_start, num_selected, num_before.
        bounds: [num_chunks, 2] int32: first token and number of tokens, within the block.
        ends: [num_chunks] int32: rows before and of the chunk together.
        allowed: [positions + 1] int32, running count of allowed positions; None allows all.
    """

    ranges: tuple[ChunkRange, ...]
    counts: tuple[int, ...]
    num_before: tuple[int, ...]
    meta: torch.Tensor
    bounds: torch.Tensor
    ends: torch.Tensor
    allowed: torch.Tensor | None

    @property
    def longest(self) -> int:
        """Tokens of the longest chunk."""
        return max(r.end - r.start for r in self.ranges)

    @property
    def num_rows(self) -> int:
        """Rows of the chunk that attends to most."""
        return max(n + r.end - r.start for n, r in zip(self.num_before, self.ranges, strict=True))

    @property
    def is_uniform(self) -> bool:
        """Whether all chunks have the same length and the same number of rows before them."""
        lengths = {r.end - r.start for r in self.ranges}
        return len(lengths) == 1 and len(set(self.num_before)) == 1


def make_plan(
    ranges: Sequence[ChunkRange],
    config: SelectionConfig,
    allowed: Ranges | None,
    prefix: torch.Tensor | None,
    device: torch.device,
    counts: Sequence[int] | None = None,
) -> BlockPlan:
    """Plans a block.

    Args:
        ranges: One per chunk; consecutive.
        config: Selection settings.
        allowed: Position ranges that may be selected.
        prefix: The device's copy of `allowed_prefix` for `allowed`.
        device: Where the tensors go.
        counts: Positions selected per chunk, where they have been selected already.
    """
    if counts is None:
        counts = [min(config.top_k, count_allowed(r, allowed)) for r in ranges]
    before = [r.init_end + n + r.start - r.local_start for r, n in zip(ranges, counts, strict=True)]
    rows = zip(ranges, counts, before, strict=True)
    meta = [(r.init_end, r.local_start, n, b) for r, n, b in rows]
    first = ranges[0].start
    bounds = [(r.start - first, r.end - r.start) for r in ranges]
    ends = [b + r.end - r.start for r, b in zip(ranges, before, strict=True)]

    def upload(rows: object) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True)

    return BlockPlan(
        ranges=tuple(ranges),
        counts=tuple(counts),
        num_before=tuple(before),
        meta=upload(meta),
        bounds=upload(bounds),
        ends=upload(ends),
        allowed=prefix,
    )


def count_allowed(around: ChunkRange, allowed: Ranges | None) -> int:
    """Candidates of a chunk that may be selected."""
    if allowed is None:
        return around.num_candidates
    mask = np.zeros(around.num_candidates, dtype=bool)
    for start, end in allowed:
        mask[max(start - around.init_end, 0) : max(end - around.init_end, 0)] = True
    return int(mask.sum())


def allowed_prefix(allowed: Ranges, length: int) -> torch.Tensor:
    """[length + 1] int32: how many of the positions before each one are in `allowed`."""
    mask = np.zeros(length + 1, dtype=np.int32)
    for start, end in allowed:
        mask[max(start, 0) + 1 : max(end, 0) + 1] = 1
    return torch.from_numpy(np.cumsum(mask, dtype=np.int32))
