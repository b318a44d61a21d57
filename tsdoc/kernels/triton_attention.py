"""Attention of a block's chunks over what they selected: gather, rotate, attend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.triton.attention import attend_equal_chunks, attend_rows
from tsdoc.kernels.triton.decode_attention import attend_window
from tsdoc.kernels.triton.gather import gather_rotated
from tsdoc.kernels.triton_parts import CacheParts
from tsdoc.kernels.triton_plan import BlockPlan, Planner
from tsdoc.kernels.triton_selection import together

ROW_BYTES = 1 << 30  # gathered K and V held at a time
FUSED_TOKENS = 64  # shorter chunks do not pay for two attention calls


class ChunkAttention:
    """Attends from consecutive chunks.

    Args:
        parts: Pool and device.
        rope: Table for all compact positions.
        planner: Makes plans of a block's chunks.
    """

    def __init__(self, parts: CacheParts, rope: RopeTable, planner: Planner) -> None:
        self._parts = parts
        self._rope = rope
        self._planner = planner
        # Queries, their chunks' num_before and their rotated copy: see `expect`.
        self._expected: tuple[torch.Tensor, tuple[int, ...], torch.Tensor] | None = None

    def expect(self, q: torch.Tensor, plan: BlockPlan) -> torch.Tensor | None:
        """Room for `q` rotated to compact positions, where attention of the same q can use it."""
        if not is_fused(q, plan):
            return None
        rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._expected = (q, plan.num_before, rotated)
        return rotated

    def attend(
        self, layer: int, q: torch.Tensor, selected: Sequence[torch.Tensor], plan: BlockPlan
    ) -> torch.Tensor:
        """See `DeviceCache.attend_chunks`; the plan counts what is selected."""
        positions = together(selected, q.device)
        num_kv, head_dim = self._parts.pool.keys[layer].shape[1:]
        size = 2 * num_kv * plan.num_rows * head_dim * self._parts.compute_dtype.itemsize
        step = max(1, ROW_BYTES // size)
        ranges = plan.ranges
        if len(ranges) <= step:
            return self._attend(layer, q, positions, plan)
        outputs, origin = [], ranges[0].start
        for first in range(0, len(ranges), step):
            part = slice(first, first + step)
            some = self._planner.make(ranges[part], None, plan.counts[part])
            own = q[some.ranges[0].start - origin : some.ranges[-1].end - origin]
            outputs.append(self._attend(layer, own, positions[part], some))
        return torch.cat(outputs)

    def _attend(
        self, layer: int, q: torch.Tensor, positions: torch.Tensor, plan: BlockPlan
    ) -> torch.Tensor:
        k, v = gather_plan(
            self._parts, self._rope, layer, positions, plan, plan.ends, plan.num_rows
        )
        if not is_fused(q, plan):
            return attend_rows(q, k, v, plan.meta, plan.bounds, self._rope, longest=plan.longest)
        rotated = None
        if self._expected is not None:
            whose, num_before, rotated = self._expected
            self._expected = None
            if whose is not q or num_before != plan.num_before:
                rotated = None
        return attend_equal_chunks(
            q,
            k,
            v,
            plan.meta,
            plan.bounds,
            self._rope,
            num_before=plan.num_before[0],
            chunk_len=plan.longest,
            rotated=rotated,
        )


class TritonWindow:
    """See `Window`: k (rotated) and v, [num_kv_heads, num_rows, head_dim], grown by appending."""

    def __init__(
        self,
        parts: CacheParts,
        rope: RopeTable,
        layer: int,
        positions: torch.Tensor,
        plan: BlockPlan,
    ) -> None:
        self._parts = parts
        self._rope = rope
        self._layer = layer
        self._length = plan.num_before[0]
        ends, rows = plan.meta[:, 3].contiguous(), self._length + 128
        k, v = gather_plan(parts, rope, layer, positions, plan, ends, rows)
        self._k, self._v = k[0], v[0]

    def attend(self, q: torch.Tensor, position: int) -> torch.Tensor:
        """See `Window.attend`."""
        if self._length == self._k.shape[1]:
            self._k, self._v = (torch.cat((t, torch.empty_like(t)), 1) for t in (self._k, self._v))
        own = slice(self._length, self._length + 1)
        pool = self._parts.pool
        ((_, _, slot),) = pool.runs(position, position + 1)
        k, v = (
            held[self._layer][slot].unsqueeze(1).to(q.device) for held in (pool.keys, pool.values)
        )
        rotated = self._rope.rotate(k.float(), own)
        self._k[:, own] = rotated.to(self._k.dtype)
        self._v[:, own] = v.to(self._v.dtype)
        self._length += 1
        length = torch.tensor([self._length], dtype=torch.int32).to(q.device)
        out = attend_window(q[0].contiguous(), self._k, self._v, length, self._rope)
        return out.unsqueeze(0)


def is_fused(q: torch.Tensor, plan: BlockPlan) -> bool:
    """Whether all chunks' attention to the rows before them is one call of cuDNN's."""
    if not (q.is_cuda and q.itemsize == 2 and plan.is_uniform):
        return False
    if q.shape[2] > 128 or q.shape[2] % 8:  # what cuDNN takes everywhere
        return False
    return plan.longest >= FUSED_TOKENS and plan.num_before[0] > 0


def gather_plan(
    parts: CacheParts,
    rope: RopeTable,
    layer: int,
    positions: torch.Tensor,
    plan: BlockPlan,
    ends: torch.Tensor,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K, rotated to compact positions, and V: [num_chunks, num_kv_heads, rows, head_dim]."""
    pool = parts.pool
    num_kv, head_dim = pool.keys[layer].shape[1:]
    shape = (len(plan.ranges), num_kv, rows, head_dim)
    k = torch.empty(shape, dtype=parts.compute_dtype, device=parts.device)
    v = torch.empty_like(k)
    keys, values = pool.keys[layer], pool.values[layer]
    gather_rotated(keys, values, pool.page_table, positions, plan.meta, ends, rope, k, v)
    return k, v
