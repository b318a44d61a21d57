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


class Planner:
    """Makes plans, each once for all layers.

    Args:
        config: Selection settings.
        device: Where the plans' tensors go.
        num_positions: Positions there is room for.
    """

    def __init__(self, config: SelectionConfig, device: torch.device, num_positions: int) -> None:
        self._config = config
        self._device = device
        self._num_positions = num_positions
        self._plan: BlockPlan | None = None
        self._allowed: tuple[tuple[tuple[int, int], ...], torch.Tensor] | None = None

    def plan(
        self,
        ranges: Sequence[ChunkRange],
        allowed: Ranges | None = None,
        counts: Sequence[int] | None = None,
    ) -> BlockPlan:
        """The last plan where it fits, else a new one that is kept; see `make_plan`."""
        plan = self._plan
        prefix = self.prefix(allowed)
        if (
            plan is None
            or plan.ranges != tuple(ranges)
            or (counts is not None and plan.counts != tuple(counts))
            or (counts is None and plan.allowed is not prefix)
        ):
            plan = self.make(ranges, allowed, counts)
            self._plan = plan
        return plan

    def any_plan(self, ranges: Sequence[ChunkRange]) -> BlockPlan:
        """A plan of these chunks, whatever they may select."""
        plan = self._plan
        return plan if plan is not None and plan.ranges == tuple(ranges) else self.plan(ranges)

    def make(
        self, ranges: Sequence[ChunkRange], allowed: Ranges | None, counts: Sequence[int] | None
    ) -> BlockPlan:
        """A plan that is not kept."""
        return make_plan(ranges, self._config, allowed, self.prefix(allowed), self._device, counts)

    def prefix(self, allowed: Ranges | None) -> torch.Tensor | None:
        """Running count of allowed positions on the device, made once; None allows all."""
        if allowed is None:
            return None
        key = tuple((int(a), int(b)) for a, b in allowed)
        if self._allowed is None or self._allowed[0] != key:
            self._allowed = (key, allowed_prefix(allowed, self._num_positions).to(self._device))
        return self._allowed[1]


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
