"""Gathers attended K (rotated to compact positions) and V of all chunks of a block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.triton.store import slots_of
from tsdoc.kernels.triton.tiles import PAGE_SIZE, masked_rows, padded


@triton.jit(do_not_specialize=["chunk_stride", "set_stride", "num_rows"])
def _gather_kernel(
    keys_ptr,  # [num_slots, NUM_KV, HEAD_DIM]
    values_ptr,  # same
    page_table_ptr,  # [num_pages] int32
    selected_ptr,  # [num_chunks, num_sets, top_k] int32
    meta_ptr,  # [num_chunks, 4] int32: init_end, local_start, num_selected, num_before
    ends_ptr,  # [num_chunks] int32: rows of each chunk
    k_ptr,  # [num_chunks, NUM_KV, num_rows, HEAD_DIM]
    v_ptr,  # same
    cos_ptr,  # [num_positions, HEAD_DIM] float32
    sin_ptr,  # same
    skip_ptr,  # int32
    chunk_stride,
    set_stride,
    num_rows,
    HEADS_PER_SET: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    PAGE: tl.constexpr,
):
    if HAS_SKIP:
        if tl.load(skip_ptr) != 0:
            return
    kv_head, chunk = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    end = tl.load(ends_ptr + chunk)
    if tl.program_id(0) * BLOCK_R >= end:
        return
    init_end = tl.load(meta_ptr + 4 * chunk)
    local_start = tl.load(meta_ptr + 4 * chunk + 1)
    num_selected = tl.load(meta_ptr + 4 * chunk + 2)
    inside = rows < end
    chosen = rows - init_end
    is_chosen = (chosen >= 0) & (chosen < num_selected) & inside
    which = chunk * chunk_stride + kv_head // HEADS_PER_SET * set_stride + chosen
    positions = tl.load(selected_ptr + which, mask=is_chosen, other=0)
    positions = tl.where(chosen < 0, rows, positions)
    positions = tl.where(chosen >= num_selected, local_start + chosen - num_selected, positions)
    slots = masked_rows(page_table_ptr, positions, inside, PAGE)
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, BLOCK_H)
    mask = inside[:, None] & (dims < HALF)[None, :]
    source = (slots[:, None] * NUM_KV + kv_head) * HEAD_DIM + dims[None, :]
    a = tl.load(keys_ptr + source, mask=mask).to(tl.float32)
    b = tl.load(keys_ptr + source + HALF, mask=mask).to(tl.float32)
    v_low = tl.load(values_ptr + source, mask=mask)
    v_high = tl.load(values_ptr + source + HALF, mask=mask)
    table = rows[:, None] * HEAD_DIM + dims[None, :]
    cos = tl.load(cos_ptr + table, mask=mask)
    sin = tl.load(sin_ptr + table, mask=mask)
    plane = (chunk * NUM_KV + kv_head).to(tl.int64) * num_rows
    target = (plane + rows[:, None]) * HEAD_DIM + dims[None, :]
    type_out = k_ptr.dtype.element_ty
    tl.store(k_ptr + target, (a * cos - b * sin).to(type_out), mask=mask)
    tl.store(k_ptr + target + HALF, (b * cos + a * sin).to(type_out), mask=mask)
    tl.store(v_ptr + target, v_low.to(type_out), mask=mask)
    tl.store(v_ptr + target + HALF, v_high.to(type_out), mask=mask)


def gather_rotated(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    selected: torch.Tensor,
    meta: torch.Tensor,
    ends: torch.Tensor,
    rope: RopeTable,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    skip: torch.Tensor | None = None,
) -> None:
    """Writes rows init, selected and [local_start, …) of each chunk into `k` and `v`.

    Args:
        keys: [num_slots, num_kv_heads, head_dim] pool, without RoPE.
        values: Same.
        page_table: [num_pages] int32.
        selected: [num_chunks, num_sets, top_k] int32, the last dimension contiguous.
        meta: [num_chunks, 4] int32: init_end, local_start, num_selected, num_before.
        ends: [num_chunks] int32, rows to write: num_before, or with the chunk's own tokens.
        rope: Table that covers the longest chunk's rows.
        k: [num_chunks, num_kv_heads, num_rows, head_dim], written: row r rotated to position r.
        v: Same, written.
        skip: Int32 [1]; when it is not 0, nothing is written.
    """
    num_chunks, num_kv, num_rows, head_dim = k.shape
    block = 32
    _gather_kernel[(triton.cdiv(num_rows, block), num_kv, num_chunks)](
        keys,
        values,
        page_table,
        selected,
        meta,
        ends,
        k,
        v,
        rope.cos,
        rope.sin,
        skip,
        selected.stride(0),
        selected.stride(1),
        num_rows,
        HEADS_PER_SET=num_kv // selected.shape[1],
        NUM_KV=num_kv,
        HEAD_DIM=head_dim,
        BLOCK_H=padded(head_dim // 2),
        BLOCK_R=block,
        HAS_SKIP=skip is not None,
        PAGE=PAGE_SIZE,
    )


def reference_gather(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    rope: RopeTable,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk in plain torch: `positions` [num_sets, n] → k, v [num_kv_heads, n, head_dim]."""
    num_kv = keys.shape[1]
    heads = torch.arange(num_kv, device=keys.device)
    slots = slots_of(page_table, positions)[heads * positions.shape[0] // num_kv]
    k = keys[slots, heads[:, None]].float()
    v = values[slots, heads[:, None]].float()
    return rope.rotate(k, slice(0, positions.shape[1])), v
