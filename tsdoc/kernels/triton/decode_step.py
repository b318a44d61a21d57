"""The start of a decode step in one layer, on the device: store K/V, hit or miss, next row.

Selection Cache (paper section 4.3): see `tsdoc.engine.selection_cache`, which this repeats without
the host. What later kernels of the step read: `skip` (1 on a hit), `meta` and `ends`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.triton.hot_rows import HotLayer
from tsdoc.kernels.triton.tiles import PAGE_SIZE, first_row, padded

# Columns of a layer's state.
HAS, WHOLE, HITS, LENGTH, LOOKUPS, TOTAL_HITS = range(6)
STATE_SIZE = 8


@triton.jit
def _load_query(
    q_ptr, cos_ptr, sin_ptr, n_local, factor,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The selection query's halves, rotated as at position n_local; where they are; the mask."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, BLOCK_H)
    heads = tl.arange(0, BLOCK_Q)
    mask = (heads < NUM_HEADS)[:, None] & (dims < HALF)[None, :]
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    a = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(q_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + n_local * HEAD_DIM + dims, mask=dims < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + n_local * HEAD_DIM + dims, mask=dims < HALF, other=0.0)[None, :]
    return (a * cos - b * sin) * factor, (b * cos + a * sin) * factor, at, mask


@triton.jit
def _compare_kernel(
    q_ptr,  # [num_heads, HEAD_DIM]
    remembered_ptr,  # [num_heads, HEAD_DIM] float32: unit query of the last selection
    likeness_ptr,  # [2] float32 out
    cos_ptr,
    sin_ptr,
    factor,
    n_local,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    low, high, at, mask = _load_query(
        q_ptr, cos_ptr, sin_ptr, n_local, factor, NUM_HEADS, HEAD_DIM, BLOCK_Q, BLOCK_H
    )
    old_low = tl.load(remembered_ptr + at, mask=mask, other=0.0)
    old_high = tl.load(remembered_ptr + at + HEAD_DIM // 2, mask=mask, other=0.0)
    tl.store(likeness_ptr, tl.sum(tl.sum(old_low * low + old_high * high, 1), 0))
    tl.store(likeness_ptr + 1, tl.sum(tl.sum(low * low + high * high, 1), 0))


@triton.jit
def _begin_kernel(
    q_ptr,  # [num_heads, HEAD_DIM]
    k_ptr,  # [NUM_KV, HEAD_DIM]
    v_ptr,  # same
    keys_ptr,  # [num_slots, NUM_KV, HEAD_DIM] pool
    values_ptr,  # same
    page_table_ptr,  # [num_pages] int32
    window_k_ptr,  # [NUM_KV, num_rows, HEAD_DIM]
    window_v_ptr,  # same
    query_ptr,  # [num_heads, HEAD_DIM] out: scaled selection query
    remembered_ptr,  # [num_heads, HEAD_DIM] float32: unit query of the last selection
    state_ptr,  # [8] int32
    position_ptr,  # [1] int32
    meta_ptr,  # [1, 4] int32 out
    ends_ptr,  # [1] int32 out
    skip_ptr,  # [1] int32 out
    allowed_ptr,  # [positions + 1] int32, running count of allowed positions
    likeness_ptr,  # [NUM_RANKS, 2] float32, see `compare_query`
    recent_k_ptr,  # [n_init + n_local + 1, NUM_KV, HEAD_DIM]: see HotLayer
    recent_v_ptr,  # same
    cos_ptr,
    sin_ptr,
    scale,
    factor,
    theta,
    n_init,
    n_local,
    top_k,
    max_hits,
    num_rows,
    NUM_HEADS: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_THETA: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    HAS_RECENT: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGE: tl.constexpr,
):
    position = tl.load(position_ptr)
    init_end = tl.minimum(n_init, position)
    local_start = tl.maximum(init_end, position - n_local)
    count = local_start - init_end
    whole = count <= top_k
    if HAS_ALLOWED:
        count = tl.load(allowed_ptr + local_start) - tl.load(allowed_ptr + init_end)
        whole = count < 0  # never
    num_selected = tl.minimum(count, top_k)

    # The selection query: rotated as at position n_local, against un-rotated keys.
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, BLOCK_H)
    low, high, at, mask = _load_query(
        q_ptr, cos_ptr, sin_ptr, n_local, factor, NUM_HEADS, HEAD_DIM, BLOCK_Q, BLOCK_H
    )
    type_q = query_ptr.dtype.element_ty
    tl.store(query_ptr + at, (low * scale).to(type_q), mask=mask)
    tl.store(query_ptr + at + HALF, (high * scale).to(type_q), mask=mask)

    if NUM_RANKS > 1:
        product = tl.load(likeness_ptr)
        square = tl.load(likeness_ptr + 1)
        for rank in tl.static_range(1, NUM_RANKS):
            product += tl.load(likeness_ptr + 2 * rank)
            square += tl.load(likeness_ptr + 2 * rank + 1)
    else:
        old_low = tl.load(remembered_ptr + at, mask=mask, other=0.0)
        old_high = tl.load(remembered_ptr + at + HALF, mask=mask, other=0.0)
        product = tl.sum(tl.sum(old_low * low + old_high * high, 1), 0)
        square = tl.sum(tl.sum(low * low + high * high, 1), 0)
    unit = 1.0 / tl.maximum(tl.sqrt(square), 1.1754943508222875e-38)
    cosine = product * unit

    length = tl.load(state_ptr + 3)
    num_lookups, num_hits = tl.load(state_ptr + 4), tl.load(state_ptr + 5)
    has = tl.load(state_ptr + 0) != 0
    last_whole = tl.load(state_ptr + 1) != 0
    hits = tl.load(state_ptr + 2)
    free = whole & has & last_whole  # nothing to select: no look-up either
    near = free & False
    if HAS_THETA:
        near = (free == 0) & has & (hits < max_hits) & (cosine >= theta)
    hit = free | near
    miss = hit == 0
    num_before = init_end + num_selected + position - local_start
    row = tl.where(hit, length, num_before)
    tl.debug_barrier()  # every warp has read the state before any of them changes it
    tl.store(state_ptr + 0, 1)
    tl.store(state_ptr + 1, tl.where(hit, last_whole, whole).to(tl.int32))
    tl.store(state_ptr + 2, tl.where(hit, hits + near.to(tl.int32), 0))
    tl.store(state_ptr + 3, row + 1)
    tl.store(state_ptr + 4, num_lookups + (free == 0).to(tl.int32))
    tl.store(state_ptr + 5, num_hits + near.to(tl.int32))
    tl.store(skip_ptr, hit.to(tl.int32))
    tl.store(meta_ptr + 0, init_end)
    tl.store(meta_ptr + 1, local_start)
    tl.store(meta_ptr + 2, num_selected)
    tl.store(meta_ptr + 3, num_before)
    tl.store(ends_ptr, num_before)
    tl.store(remembered_ptr + at, low * unit, mask=mask & miss)
    tl.store(remembered_ptr + at + HALF, high * unit, mask=mask & miss)

    # This token's K and V: to the pool as they are, to the window's next row with RoPE.
    heads = tl.arange(0, BLOCK_KV)
    mask = (heads < NUM_KV)[:, None] & (dims < HALF)[None, :]
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    slot = first_row(page_table_ptr, position, PAGE) * (NUM_KV * HEAD_DIM)
    type_kv = keys_ptr.dtype.element_ty
    k_low = tl.load(k_ptr + at, mask=mask).to(type_kv)
    k_high = tl.load(k_ptr + at + HALF, mask=mask).to(type_kv)
    v_low = tl.load(v_ptr + at, mask=mask).to(type_kv)
    v_high = tl.load(v_ptr + at + HALF, mask=mask).to(type_kv)
    tl.store(keys_ptr + slot + at, k_low, mask=mask)
    tl.store(keys_ptr + slot + at + HALF, k_high, mask=mask)
    tl.store(values_ptr + slot + at, v_low, mask=mask)
    tl.store(values_ptr + slot + at + HALF, v_high, mask=mask)
    if HAS_RECENT:
        near = tl.where(position < n_init, position, n_init + position % (n_local + 1))
        near = near * (NUM_KV * HEAD_DIM)
        tl.store(recent_k_ptr + near + at, k_low, mask=mask)
        tl.store(recent_k_ptr + near + at + HALF, k_high, mask=mask)
        tl.store(recent_v_ptr + near + at, v_low, mask=mask)
        tl.store(recent_v_ptr + near + at + HALF, v_high, mask=mask)
    cos = tl.load(cos_ptr + row * HEAD_DIM + dims, mask=dims < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * HEAD_DIM + dims, mask=dims < HALF, other=0.0)[None, :]
    a, b = k_low.to(tl.float32), k_high.to(tl.float32)
    target = (heads[:, None] * num_rows + row) * HEAD_DIM + dims[None, :]
    type_w = window_k_ptr.dtype.element_ty
    tl.store(window_k_ptr + target, (a * cos - b * sin).to(type_w), mask=mask)
    tl.store(window_k_ptr + target + HALF, (b * cos + a * sin).to(type_w), mask=mask)
    tl.store(window_v_ptr + target, v_low.to(type_w), mask=mask)
    tl.store(window_v_ptr + target + HALF, v_high.to(type_w), mask=mask)


def compare_query(
    q: torch.Tensor, remembered: torch.Tensor, rope: RopeTable, n_local: int
) -> torch.Tensor:
    """What the heads of one rank say about how near a query is to that of the last selection.

    Args:
        q: [num_qo_heads, head_dim], before RoPE, contiguous.
        remembered: [num_qo_heads, head_dim] float32: as for `begin_step`.
        rope: Table of compact positions.
        n_local: Selection setting.

    Returns:
        [2] float32: product with `remembered`, and square of the selection query.
    """
    num_heads, head_dim = q.shape
    likeness = torch.empty(2, device=q.device)
    _compare_kernel[(1,)](
        q, remembered, likeness, rope.cos, rope.sin, rope.attention_factor, n_local,
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_Q=padded(num_heads),
        BLOCK_H=padded(head_dim // 2), num_warps=8,
    )  # fmt: skip
    return likeness


def begin_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    window_k: torch.Tensor,
    window_v: torch.Tensor,
    query: torch.Tensor,
    remembered: torch.Tensor,
    state: torch.Tensor,
    position: torch.Tensor,
    meta: torch.Tensor,
    ends: torch.Tensor,
    skip: torch.Tensor,
    allowed: torch.Tensor | None,
    likeness: torch.Tensor | None,
    hot: HotLayer | None,
    rope: RopeTable,
    scale: float,
    theta: float | None,
    n_init: int,
    n_local: int,
    top_k: int,
    max_hits: int,
) -> None:
    """Decides hit or miss for one layer and stores the token's K and V.

    Args:
        q: [num_qo_heads, head_dim], before RoPE, contiguous.
        k: [num_kv_heads, head_dim], contiguous.
        v: Same.
        keys: [num_slots, num_kv_heads, head_dim] pool, written at `position`.
        values: Same.
        page_table: [num_pages] int32.
        window_k: [num_kv_heads, num_rows, head_dim], written at the window's next row.
        window_v: Same.
        query: [num_qo_heads, head_dim], receives the selection query times `scale`.
        remembered: [num_qo_heads, head_dim] float32, unit query of the last selection; updated.
        state: [8] int32 of the layer, zeros at an answer's start; updated.
        position: [1] int32, of this token.
        meta: [1, 4] int32, receives init_end, local_start, num_selected, num_before.
        ends: [1] int32, receives num_before.
        skip: [1] int32, receives 1 on a hit, else 0.
        allowed: [positions + 1] int32, running count of positions that may be selected.
        likeness: [num_ranks, 2] float32, `compare_query` of all ranks, where heads are spread over
            several; `remembered` is then this rank's part of a unit vector.
        hot: Receives the token's K and V among the last ones'; None where the pool is on the
            device.
        rope: Table of compact positions.
        scale: What scores are multiplied with.
        theta: Least cosine of a hit; None never hits.
        n_init: Selection setting.
        n_local: Selection setting.
        top_k: Selection setting.
        max_hits: Hits after which a refresh is forced.
    """
    num_heads, head_dim = q.shape
    num_kv = k.shape[0]
    _begin_kernel[(1,)](
        q, k, v, keys, values, page_table, window_k, window_v, query, remembered, state, position,
        meta, ends, skip, allowed, likeness, hot.recent_k if hot else None,
        hot.recent_v if hot else None, rope.cos, rope.sin, scale, rope.attention_factor,
        0.0 if theta is None else theta, n_init, n_local, top_k, max_hits, window_k.shape[1],
        NUM_HEADS=num_heads, NUM_KV=num_kv, HEAD_DIM=head_dim, HAS_THETA=theta is not None,
        HAS_ALLOWED=allowed is not None, HAS_RECENT=hot is not None,
        NUM_RANKS=1 if likeness is None else likeness.shape[0],
        BLOCK_Q=padded(num_heads), BLOCK_KV=padded(num_kv), BLOCK_H=padded(head_dim // 2),
        PAGE=PAGE_SIZE, num_warps=8,
    )  # fmt: skip
