"""Selection queries: the mean of a chunk's rotated queries (reference: `selection_query`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.triton.tiles import padded


@triton.jit
def _query_kernel(
    q_ptr,  # [num_tokens, num_qo_heads, HEAD_DIM], tokens q_stride apart
    out_ptr,  # [num_chunks, num_qo_heads, HEAD_DIM] float32
    cos_ptr,  # [num_positions, HEAD_DIM] float32
    sin_ptr,  # same
    bounds_ptr,  # [num_chunks, 2] int32: first token and number of tokens, within q
    meta_ptr,  # [num_chunks, 4] int32: init_end, local_start, num_selected, num_before
    rotated_ptr,  # [num_tokens, num_qo_heads, HEAD_DIM] out, where ROTATE
    factor,
    n_local,
    q_stride,
    num_heads,
    ROTATE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(bounds_ptr + 2 * chunk)
    count = tl.load(bounds_ptr + 2 * chunk + 1)
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, BLOCK_H)
    low = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    high = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for at in range(0, count, BLOCK_T):
        tokens = at + tl.arange(0, BLOCK_T)
        mask = (tokens < count)[:, None] & (dims < HALF)[None, :]
        source = (first + tokens)[:, None].to(tl.int64) * q_stride + head * HEAD_DIM + dims[None, :]
        table = (n_local + tokens)[:, None] * HEAD_DIM + dims[None, :]
        a = tl.load(q_ptr + source, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(q_ptr + source + HALF, mask=mask, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + table, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + table, mask=mask, other=0.0)
        low += a * cos - b * sin
        high += b * cos + a * sin
        if ROTATE:  # the same queries for attention, at compact positions
            places = tl.load(meta_ptr + 4 * chunk + 3) + tokens
            table = places[:, None] * HEAD_DIM + dims[None, :]
            cos = tl.load(cos_ptr + table, mask=mask, other=0.0)
            sin = tl.load(sin_ptr + table, mask=mask, other=0.0)
            row = (first + tokens)[:, None].to(tl.int64) * num_heads + head
            out = rotated_ptr + row * HEAD_DIM + dims[None, :]
            dtype = rotated_ptr.dtype.element_ty
            tl.store(out, (a * cos - b * sin).to(dtype), mask=mask)
            tl.store(out + HALF, (b * cos + a * sin).to(dtype), mask=mask)
    scale = factor / count
    target = out_ptr + (chunk * num_heads + head) * HEAD_DIM + dims
    tl.store(target, tl.sum(low, 0) * scale, mask=dims < HALF)
    tl.store(target + HALF, tl.sum(high, 0) * scale, mask=dims < HALF)


def selection_queries(
    q: torch.Tensor,
    bounds: torch.Tensor,
    rope: RopeTable,
    n_local: int,
    *,
    meta: torch.Tensor | None = None,
    rotated: torch.Tensor | None = None,
) -> torch.Tensor:
    """Selection queries of several chunks: see `tsdoc.kernels.selection.selection_query`.

    Args:
        q: [num_tokens, num_qo_heads, head_dim], before RoPE; heads and dimensions contiguous.
        bounds: [num_chunks, 2] int32, first token and number of tokens of each chunk.
        rope: Table that covers n_local plus the longest chunk.
        n_local: Position of a chunk's first token.
        meta: [num_chunks, 4] int32: init_end, local_start, num_selected, num_before; with
            `rotated`.
        rotated: [num_tokens, num_qo_heads, head_dim], receives the queries rotated to their
            compact positions, for attention, which would have to read them once more.

    Returns:
        [num_chunks, num_qo_heads, head_dim] float32.
    """
    num_heads, head_dim = q.shape[1:]
    out = torch.empty(bounds.shape[0], num_heads, head_dim, device=q.device)
    _query_kernel[(bounds.shape[0], num_heads)](
        q,
        out,
        rope.cos,
        rope.sin,
        bounds,
        meta,
        rotated,
        rope.attention_factor,
        n_local,
        q.stride(0),
        num_heads,
        ROTATE=rotated is not None,
        HEAD_DIM=head_dim,
        BLOCK_H=padded(head_dim // 2),
        BLOCK_T=32,
    )
    return out
