"""What the passes over K of a prefill block share: rows of a tile, its scores, its candidates.

Rows of the left operand are (chunk, query head of the group), padded to powers of two and ordered
so that a group's rows meet in one thread of the matrix unit's layout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tsdoc.kernels.triton.tiles import first_row


@triton.jit
def _row_chunk(rows, R: tl.constexpr, GP: tl.constexpr, WIDE: tl.constexpr):
    """Chunk of each row of the tile; see `sum_groups`."""
    if WIDE and GP >= 4 and GP <= 32:
        LANES: tl.constexpr = GP // 4
        chunk = (rows // 16) % 4 * (8 // LANES) + rows % 8 // LANES
    elif R >= 16 and GP >= 2 and GP <= 16:
        LANES: tl.constexpr = GP // 2
        chunk = rows // 16 * (8 // LANES) + rows % 8 // LANES
    else:
        chunk = rows // GP
    return chunk


@triton.jit
def _row_member(rows, R: tl.constexpr, GP: tl.constexpr, WIDE: tl.constexpr):
    """Which query head of the group each row of the tile is; see `sum_groups`."""
    if WIDE and GP >= 4 and GP <= 32:
        LANES: tl.constexpr = GP // 4
        member = (rows // 64 * 2 + rows // 8 % 2) * LANES + rows % LANES
    elif R >= 16 and GP >= 2 and GP <= 16:
        LANES: tl.constexpr = GP // 2
        member = rows // 8 % 2 * LANES + rows % LANES
    else:
        member = rows % GP
    return member


@triton.jit
def tile_rows(
    batch, num_chunks, GROUP: tl.constexpr, GP: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Chunk, head of its group, and whether there are such, of each row of batch `batch`."""
    rows = tl.arange(0, R)
    chunk = batch * (R // GP) + _row_chunk(rows, R, GP, WIDE)
    member = _row_member(rows, R, GP, WIDE)
    return chunk, member, (chunk < num_chunks) & (member < GROUP)


@triton.jit
def sum_groups(p, R: tl.constexpr, GP: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sums [R, BLOCK_N] over the rows of each group: [R / GP, BLOCK_N].

    A thread of the matrix unit holds rows r, r + 8 (and r + 64 where WIDE: 128 rows over 4 warps);
    most of a group's rows are placed there, so that few values cross lanes.
    """
    if GP == 1:
        out = p
    elif WIDE and GP >= 4 and GP <= 32:
        LANES: tl.constexpr = GP // 4
        x = tl.sum(tl.reshape(p, [2, 4, 2, 8 // LANES, LANES, BLOCK_N]), 0)
        x = tl.sum(tl.sum(x, 1), 2)
        out = tl.reshape(x, [R // GP, BLOCK_N])
    elif R >= 16 and GP >= 2 and GP <= 16:
        LANES: tl.constexpr = GP // 2
        x = tl.sum(tl.reshape(p, [R // 16, 2, 8 // LANES, LANES, BLOCK_N]), 1)
        out = tl.reshape(tl.sum(x, 2), [R // GP, BLOCK_N])
    else:
        out = tl.sum(tl.reshape(p, [R // GP, GP, BLOCK_N]), 1)
    return out


@triton.jit
def load_queries(q_ptr, chunk, head, valid, dims, num_heads, HEAD_DIM: tl.constexpr):
    """Rows [R, BLOCK_D] of q [num_chunks, num_heads, HEAD_DIM]."""
    source = (chunk * num_heads + head)[:, None] * HEAD_DIM + dims[None, :]
    return tl.load(q_ptr + source, mask=valid[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_keys(
    keys_ptr,
    page_table_ptr,
    first,
    kv_head,
    dims,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
):
    """K of one KV head, [BLOCK_D, BLOCK_N]; a tile lies within one page.

    Rows that were never written may hold anything: their columns are masked out after the product.
    """
    row = first_row(page_table_ptr, first, PAGE)
    base = keys_ptr + (row * NUM_KV + kv_head) * HEAD_DIM
    offsets = tl.arange(0, BLOCK_N)[None, :] * (NUM_KV * HEAD_DIM) + dims[:, None]
    if BLOCK_D == HEAD_DIM:
        return tl.load(base + offsets)
    return tl.load(base + offsets, mask=(dims < HEAD_DIM)[:, None], other=0.0)


@triton.jit
def score_tile(
    q,
    keys_ptr,
    page_table_ptr,
    tile,
    kv_head,
    dims,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Scores [R, BLOCK_N] of queries q [R, BLOCK_D] with the keys of one tile."""
    k = load_keys(
        keys_ptr, page_table_ptr, tile * BLOCK_N, kv_head, dims,
        NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE,
    )  # fmt: skip
    return tl.dot(q, k.to(q.dtype), input_precision=PRECISION)


@triton.jit
def candidates(
    allowed_ptr, first, low, high, valid, HAS_ALLOWED: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Which keys of a tile each row may select: [R, BLOCK_N]."""
    positions = first + tl.arange(0, BLOCK_N)
    mask = valid[:, None] & (positions[None, :] >= low) & (positions[None, :] < high[:, None])
    if HAS_ALLOWED:
        inside = positions < tl.max(high, 0)
        before = tl.load(allowed_ptr + positions, mask=inside, other=0)
        after = tl.load(allowed_ptr + positions + 1, mask=inside, other=0)
        mask = mask & (after > before)[None, :]
    return mask


@triton.jit
def num_border_tiles(tile_low, tile_inner, tile_outer, tile_high):
    """How many tiles lie before and behind the inner ones: there chunks differ in candidates.

    Returns:
        Number before, and number in all.
    """
    before = tl.maximum(tl.minimum(tile_inner, tile_high) - tile_low, 0)
    behind = tl.maximum(tile_outer, tile_low + before)
    return before, before + tl.maximum(tile_high - behind, 0)


@triton.jit
def border_tile(number, before, tile_low, tile_outer):
    """Border tile `number`, of which `before` come first."""
    behind = tl.maximum(tile_outer, tile_low + before)
    return tl.where(number < before, tile_low + number, behind + number - before)
