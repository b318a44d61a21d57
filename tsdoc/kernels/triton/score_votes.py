"""Pass 2 over K: the scores again, their probabilities, and their sum over heads: the votes."""

from __future__ import annotations

import triton
import triton.language as tl

from tsdoc.kernels.triton.score_tiles import (
    border_tile,
    candidates,
    load_queries,
    num_border_tiles,
    score_tile,
    sum_groups,
    tile_rows,
)


@triton.jit(
    do_not_specialize=["num_chunks", "num_heads", "tile_inner", "tile_outer", "num_together"]
)
def votes_kernel(
    q_ptr,  # [num_chunks, num_heads, HEAD_DIM], scaled
    keys_ptr,  # [num_slots, NUM_KV, HEAD_DIM]
    page_table_ptr,  # [num_pages] int32
    lse_ptr,  # [num_chunks, num_heads] float32
    votes_ptr,  # [num_planes, num_chunks, stride] float32
    num_chunks,
    num_heads,
    stride,
    tile_inner,
    tile_outer,
    num_together,  # tiles that a program takes through all heads at a time
    SOFT: tl.constexpr,
    HEADS: tl.constexpr,  # KV heads per plane
    GROUP: tl.constexpr,
    GP: tl.constexpr,
    R: tl.constexpr,
    WIDE: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE: tl.constexpr,
):
    """The tiles all of whose keys are candidates of every chunk."""
    plane, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(1)
    chunk, member, valid = tile_rows(batch, num_chunks, GROUP, GP, R, WIDE)
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    out_chunk = batch * (R // GP) + tl.arange(0, R // GP)
    out_row = (plane * num_chunks + out_chunk).to(tl.int64)[:, None] * stride
    out_mask = (out_chunk < num_chunks)[:, None]

    # A few tiles at a time go through all heads: their votes grow in the L2 cache meanwhile.
    first = tile_inner + split * num_together
    for group in range(first, tile_outer, num_splits * num_together):
        for number in tl.range(HEADS, num_stages=1):
            kv_head = plane * HEADS + number
            head = kv_head * GROUP + member
            q = load_queries(q_ptr, chunk, head, valid, dims, num_heads, HEAD_DIM)
            if SOFT:  # padding rows get probability 0
                lse = tl.load(lse_ptr + chunk * num_heads + head, mask=valid, other=float("inf"))
            for tile in range(group, tl.minimum(group + num_together, tile_outer)):
                target = votes_ptr + out_row + (tile * BLOCK_N + columns)[None, :]
                if HEADS > 1:
                    so_far = tl.load(target, mask=out_mask & (number > 0), other=0.0)
                scores = score_tile(
                    q, keys_ptr, page_table_ptr, tile, kv_head, dims,
                    NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, PAGE,
                )  # fmt: skip
                if SOFT:
                    scores = tl.exp2(scores - lse[:, None])
                votes = sum_groups(scores, R, GP, WIDE, BLOCK_N)
                if HEADS > 1:
                    votes += so_far
                tl.store(target, votes, mask=out_mask)
            if HEADS > 1:
                tl.debug_barrier()  # what one warp wrote, another may read


@triton.jit(
    do_not_specialize=[
        "num_chunks", "num_heads", "tile_low", "tile_inner", "tile_outer", "tile_high"
    ]
)  # fmt: skip
def border_votes_kernel(
    q_ptr,  # [num_chunks, num_heads, HEAD_DIM], scaled
    keys_ptr,  # [num_slots, NUM_KV, HEAD_DIM]
    page_table_ptr,  # [num_pages] int32
    meta_ptr,  # [num_chunks, 4] int32: init_end, local_start, num_selected, num_before
    allowed_ptr,  # [positions + 1] int32, running count of allowed positions
    lse_ptr,  # [num_chunks, num_heads] float32
    votes_ptr,  # [num_planes, num_chunks, stride] float32
    num_chunks,
    num_heads,
    stride,
    tile_low,
    tile_inner,
    tile_outer,
    tile_high,
    SOFT: tl.constexpr,
    HEADS: tl.constexpr,  # KV heads per plane
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
    """The tiles before and behind those, where chunks differ in what they may select."""
    plane, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(1)
    chunk, member, valid = tile_rows(batch, num_chunks, GROUP, GP, R, WIDE)
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    out_chunk = batch * (R // GP) + tl.arange(0, R // GP)
    out_row = (plane * num_chunks + out_chunk).to(tl.int64)[:, None] * stride
    out_mask = (out_chunk < num_chunks)[:, None]

    low = tl.load(meta_ptr + 4 * (num_chunks - 1))
    high = tl.load(meta_ptr + 4 * chunk + 1, mask=valid, other=0)
    before, num_border = num_border_tiles(tile_low, tile_inner, tile_outer, tile_high)
    for number in range(split, num_border, num_splits):
        tile = border_tile(number, before, tile_low, tile_outer)
        mask = candidates(allowed_ptr, tile * BLOCK_N, low, high, valid, HAS_ALLOWED, BLOCK_N)
        votes = tl.zeros([R // GP, BLOCK_N], tl.float32)
        for which in tl.range(HEADS, num_stages=1):
            kv_head = plane * HEADS + which
            head = kv_head * GROUP + member
            q = load_queries(q_ptr, chunk, head, valid, dims, num_heads, HEAD_DIM)
            scores = score_tile(
                q, keys_ptr, page_table_ptr, tile, kv_head, dims,
                NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION, PAGE,
            )  # fmt: skip
            if SOFT:
                lse = tl.load(lse_ptr + chunk * num_heads + head, mask=valid, other=float("inf"))
                # Masked before: what is no candidate may be unwritten memory.
                scores = tl.exp2(tl.where(mask, scores - lse[:, None], float("-inf")))
            else:
                scores = tl.where(mask, scores, 0.0)
            votes += sum_groups(scores, R, GP, WIDE, BLOCK_N)
        allowed = sum_groups(mask.to(tl.float32), R, GP, WIDE, BLOCK_N) > 0
        target = out_row + (tile * BLOCK_N + columns)[None, :]
        tl.store(votes_ptr + target, tl.where(allowed, votes, float("-inf")), mask=out_mask)
