"""Stores K and V of consecutive tokens in their pages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.tiles import PAGE_SIZE, masked_rows, padded


@triton.jit(do_not_specialize=["start", "num_tokens"])
def _store_kernel(
    k_ptr,  # [num_tokens, ROW], rows row_stride apart
    v_ptr,  # same
    keys_ptr,  # [num_slots, ROW] pool
    values_ptr,  # same
    page_table_ptr,  # [num_pages] int32
    start,
    num_tokens,
    k_stride,
    v_stride,
    ROW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr,
):
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = tokens < num_tokens
    mask = inside[:, None] & (columns < ROW)[None, :]
    rows = masked_rows(page_table_ptr, start + tokens, inside, PAGE)
    source = tokens[:, None].to(tl.int64)
    target = rows[:, None] * ROW + columns[None, :]
    k = tl.load(k_ptr + source * k_stride + columns[None, :], mask=mask)
    v = tl.load(v_ptr + source * v_stride + columns[None, :], mask=mask)
    tl.store(keys_ptr + target, k.to(keys_ptr.dtype.element_ty), mask=mask)
    tl.store(values_ptr + target, v.to(values_ptr.dtype.element_ty), mask=mask)


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    start: int,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Writes tokens [start, start + num_tokens) into the pool, cast to its type.

    Args:
        keys: [num_slots, num_kv_heads, head_dim], written in place.
        values: Same.
        page_table: [num_pages] int32, logical to physical page.
        start: Position of the first token.
        k: [num_tokens, num_kv_heads, head_dim]; heads and dimensions are contiguous.
        v: Same.
    """
    num_tokens, row = k.shape[0], keys.shape[1] * keys.shape[2]
    block_r = min(padded(row), 512)
    grid = (triton.cdiv(num_tokens, 8), triton.cdiv(row, block_r))
    _store_kernel[grid](
        k,
        v,
        keys,
        values,
        page_table,
        start,
        num_tokens,
        k.stride(0),
        v.stride(0),
        ROW=row,
        BLOCK_T=8,
        BLOCK_R=block_r,
        PAGE=PAGE_SIZE,
    )


def reference_store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    start: int,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """`store_kv` in plain torch."""
    positions = torch.arange(start, start + k.shape[0], device=k.device)
    slots = slots_of(page_table, positions)
    keys[slots], values[slots] = k.to(keys.dtype), v.to(values.dtype)


def slots_of(page_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Slots in the pool [n] int64 of absolute positions [n]."""
    return page_table[positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
