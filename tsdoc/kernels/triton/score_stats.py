"""Pass 1 over K: per (query head, chunk) one log2-sum-exp2 of its candidates' scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.score_tiles import (
    border_tile,
    candidates,
    load_queries,
    num_border_tiles,
    score_tile,
    tile_rows,
)
from tsdoc.kernels.triton.tiles import add_exp2, padded


@triton.jit(
    do_not_specialize=[
        "num_chunks", "num_heads", "num_splits", "tile_low", "tile_inner", "tile_outer", "tile_high"
    ]
)  # fmt: skip
def stats_kernel(
    q_ptr,  # [num_chunks, num_heads, HEAD_DIM], scaled
    keys_ptr,  # [num_slots, NUM_KV, HEAD_DIM]
    page_table_ptr,  # [num_pages] int32
    meta_ptr,  # [num_chunks, 4] int32: init_end, local_start, num_selected, num_before
    allowed_ptr,  # [positions + 1] int32, running count of allowed positions
    max_ptr,  # [num_chunks, num_heads, num_splits] float32
    sum_ptr,  # same
    num_chunks,
    num_heads,
    num_splits,
    tile_low,  # first tile with a candidate
    tile_inner,  # first tile that is wholly a candidate of every chunk
    tile_outer,  # one past the last such tile
    tile_high,  # one past the last tile with a candidate
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    R: tl.constexpr,
    WIDE: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Running maximum and sum of every row over a share of the tiles."""
    kv_head, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    chunk, member, valid = tile_rows(batch, num_chunks, GROUP, GP, R, WIDE)
    head = kv_head * GROUP + member
    dims = tl.arange(0, BLOCK_D)
    q = load_queries(q_ptr, chunk, head, valid, dims, num_heads, HEAD_DIM)
    low = tl.load(meta_ptr + 4 * (num_chunks - 1))
    high = tl.load(meta_ptr + 4 * chunk + 1, mask=valid, other=0)
    peak = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)

    share = tl.cdiv(tl.maximum(tile_outer - tile_inner, 0), num_splits)
    inner_begin = tile_inner + split * share
    inner_end = tl.minimum(inner_begin + share, tile_outer)
    if inner_end > inner_begin:
        # Sums relative to the first tile's maximum need no running one. They overflow only where
        # later scores exceed it by 127 (in base 2), and then the careful way is taken.
        scores = score_tile(
            q, keys_ptr, page_table_ptr, inner_begin, kv_head, dims,
            NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, PAGE,
        )  # fmt: skip
        peak = tl.max(scores, 1)
        for tile in range(inner_begin, inner_end):
            scores = score_tile(
                q, keys_ptr, page_table_ptr, tile, kv_head, dims,
                NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, PAGE,
            )  # fmt: skip
            total += tl.sum(tl.exp2(scores - peak[:, None]), 1)
        if tl.max(total, 0) == float("inf"):
            total = tl.zeros([R], tl.float32)
            for tile in range(inner_begin, inner_end):
                scores = score_tile(
                    q, keys_ptr, page_table_ptr, tile, kv_head, dims,
                    NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, PAGE,
                )  # fmt: skip
                peak, total = add_exp2(scores, peak, total)
    before, num_border = num_border_tiles(tile_low, tile_inner, tile_outer, tile_high)
    for number in range(split, num_border, num_splits):
        tile = border_tile(number, before, tile_low, tile_outer)
        scores = score_tile(
            q, keys_ptr, page_table_ptr, tile, kv_head, dims,
            NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, PAGE,
        )  # fmt: skip
        mask = candidates(allowed_ptr, tile * BLOCK_N, low, high, valid, HAS_ALLOWED, BLOCK_N)
        peak, total = add_exp2(tl.where(mask, scores, float("-inf")), peak, total)
    target = (chunk * num_heads + head) * num_splits + split
    tl.store(max_ptr + target, peak, mask=valid)
    tl.store(sum_ptr + target, total, mask=valid)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    max_ptr,  # [num_rows, num_splits] float32
    sum_ptr,  # same
    out_ptr,  # [num_rows] float32
    num_splits,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    splits = tl.arange(0, BLOCK)
    mask = splits < num_splits
    peak = tl.load(max_ptr + row * num_splits + splits, mask=mask, other=float("-inf"))
    total = tl.load(sum_ptr + row * num_splits + splits, mask=mask, other=0.0)
    top = tl.max(peak, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(total * tl.exp2(peak - safe), 0)
    # A row without candidates gives every key probability 0.
    lse = tl.where(mass > 0, safe + tl.log2(tl.where(mass > 0, mass, 1.0)), float("inf"))
    tl.store(out_ptr + row, lse)


def combine_stats(peak: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Log2-sum-exp2 per row from its splits' maxima and sums.

    Args:
        peak: [..., num_splits] float32, contiguous.
        total: Same; relative to its split's maximum.

    Returns:
        [...] float32; inf for rows without candidates.
    """
    out = torch.empty(peak.shape[:-1], device=peak.device)
    _combine_kernel[(out.numel(),)](
        peak, total, out, peak.shape[-1], BLOCK=padded(peak.shape[-1]), num_warps=1
    )
    return out
