"""Exact top-k over long rows of votes: ascending indices, ties to the lower index.

The k largest elements lie within the k tiles of 8 that have the largest maxima (of equal maxima
the earlier tile; each of those tiles has an element that beats all of any other tile). So votes
are reduced to maxima of 8 and of 64, the k best of the few thousand coarsest are found, then the
k best of the 8 k below them, down to the votes. Every step looks at about 8 k keys, which one
program holds in registers: it finds the k-th largest key bit by bit and compacts in index order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.tiles import padded

BRANCH = 8  # elements per tile, at every level
LEAST_BLOCK = 1024  # keys that are searched in one step however small k is


@triton.jit
def _reduce_kernel(
    planes_ptr,  # [num_planes, num_rows, stride] float32 by position
    votes_ptr,  # [num_rows, stride] float32: sums over planes, where WRITE_VOTES
    fine_ptr,  # [num_rows, stride / 8] float32 maxima
    coarse_ptr,  # [num_rows, stride / 64] float32 maxima
    meta_ptr,  # [num_chunks, 4] int32: init_end, local_start, num_selected, num_before
    skip_ptr,  # int32
    num_rows,
    stride,
    num_sets,
    NUM_PLANES: tl.constexpr,
    WRITE_VOTES: tl.constexpr,
    WRITE_MAXIMA: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if HAS_SKIP:
        if tl.load(skip_ptr) != 0:
            return
    row = tl.program_id(0)
    # Rows are (set, chunk): with planes of single KV heads, row r of [num_sets * num_chunks].
    chunk = row % (num_rows // num_sets)
    low = tl.load(meta_ptr + 4 * chunk)
    high = tl.load(meta_ptr + 4 * chunk + 1)
    first = tl.program_id(1) * BLOCK
    positions = first + tl.arange(0, BLOCK)
    mask = (positions >= low) & (positions < high)
    base = planes_ptr + row.to(tl.int64) * stride
    if WIDTH == 1:
        votes = tl.load(base + positions, mask=mask, other=float("-inf"))
        for plane in tl.static_range(1, NUM_PLANES):
            other = planes_ptr + (row + plane * num_rows).to(tl.int64) * stride
            votes += tl.load(other + positions, mask=mask, other=0.0)
    else:
        own = tl.load(base + positions, mask=mask, other=float("-inf"))
        votes = own
        for offset in tl.static_range(WIDTH):
            near = positions + (offset - WIDTH // 2)
            inside = (near >= low) & (near < high)
            votes = tl.maximum(votes, tl.load(base + near, mask=inside, other=float("-inf")))
        votes = tl.where(own == float("-inf"), own, votes)
    if WRITE_VOTES:
        tl.store(votes_ptr + row.to(tl.int64) * stride + positions, votes, mask=positions < stride)
    if WRITE_MAXIMA:
        fine = tl.max(tl.reshape(votes, [BLOCK // 8, 8]), 1)
        at = first // 8 + tl.arange(0, BLOCK // 8)
        tl.store(fine_ptr + row.to(tl.int64) * (stride // 8) + at, fine, mask=at < stride // 8)
        coarse = tl.max(tl.reshape(fine, [BLOCK // 64, 8]), 1)
        at = first // 64 + tl.arange(0, BLOCK // 64)
        tl.store(
            coarse_ptr + row.to(tl.int64) * (stride // 64) + at, coarse, mask=at < stride // 64
        )


@triton.jit
def _ordered(values):
    """Float32 to uint32 keys of the same order; -0 and 0 are equal."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return flipped.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _take_best(keys, mask, ids, k, out_ptr, BLOCK: tl.constexpr):
    """Writes the `ids` of the k largest keys, in their order; masked-out keys are never taken."""
    threshold = tl.full([], 0, tl.uint32)
    for bit in range(32):
        trial = threshold | (tl.full([], 1, tl.uint32) << (31 - bit))
        count = tl.sum(((keys >= trial) & mask).to(tl.int32), 0)
        threshold = tl.where(count >= k, trial, threshold)
    above = (keys > threshold) & mask
    equal = (keys == threshold) & mask
    wanted = k - tl.sum(above.to(tl.int32), 0)
    if BLOCK <= 32768:  # both counts in one scan
        packed = tl.cumsum(above.to(tl.uint32) + (equal.to(tl.uint32) << 16), 0)
        num_above = (packed & 0xFFFF).to(tl.int32) - above.to(tl.int32)
        num_equal = (packed >> 16).to(tl.int32) - equal.to(tl.int32)
    else:
        num_above = tl.cumsum(above.to(tl.int32), 0) - above.to(tl.int32)
        num_equal = tl.cumsum(equal.to(tl.int32), 0) - equal.to(tl.int32)
    place = num_above + tl.minimum(num_equal, wanted)
    tl.store(out_ptr + place, ids, mask=above | (equal & (num_equal < wanted)))


@triton.jit
def _descend(values_ptr, tiles_ptr, out_ptr, num_tiles, k, low, high, BLOCK: tl.constexpr):
    """The k best of [low, high) among the elements of `num_tiles` tiles of 8; returns how many."""
    at = tl.arange(0, BLOCK)
    listed = at < num_tiles * 8
    ids = tl.load(tiles_ptr + at // 8, mask=listed, other=0) * 8 + at % 8
    mask = listed & (ids >= low) & (ids < high)
    values = tl.load(values_ptr + ids, mask=mask, other=float("-inf"))
    kept = min(k, tl.sum(mask.to(tl.int32), 0))
    _take_best(_ordered(values), mask, ids, kept, out_ptr, BLOCK)
    return kept


@triton.jit
def _select_kernel(
    votes_ptr,  # [num_rows, stride] float32
    fine_ptr,  # [num_rows, stride / 8] float32 maxima
    coarse_ptr,  # [num_rows, stride / 64] float32 maxima
    meta_ptr,  # [num_chunks, 4] int32: init_end, local_start, num_selected, num_before
    tiles_ptr,  # [num_rows, 2, top_k] int32, work space
    out_ptr,  # [num_rows, top_k] int32
    skip_ptr,  # int32
    num_rows,
    stride,
    num_sets,
    top_k,
    LEVELS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if HAS_SKIP:
        if tl.load(skip_ptr) != 0:
            return
    row = tl.program_id(0)
    chunk = row % (num_rows // num_sets)
    low = tl.load(meta_ptr + 4 * chunk)
    length = tl.load(meta_ptr + 4 * chunk + 1)  # positions from here on are no candidates
    k = tl.load(meta_ptr + 4 * chunk + 2)
    votes = votes_ptr + row.to(tl.int64) * stride
    fine = fine_ptr + row.to(tl.int64) * (stride // 8)
    coarse = coarse_ptr + row.to(tl.int64) * (stride // 64)
    first = tiles_ptr + row * 2 * top_k
    second = first + top_k
    out = out_ptr + row * top_k
    at = tl.arange(0, BLOCK_TOP)
    if LEVELS == 1:
        mask = (at >= low) & (at < length)
        values = tl.load(votes + at, mask=mask, other=float("-inf"))
        _take_best(_ordered(values), mask, at, k, out, BLOCK_TOP)
    elif LEVELS == 2:
        mask = at < tl.cdiv(length, 8)
        values = tl.load(fine + at, mask=mask, other=float("-inf"))
        kept = min(k, tl.cdiv(length, 8))
        _take_best(_ordered(values), mask, at, kept, first, BLOCK_TOP)
        tl.debug_barrier()
        _descend(votes, first, out, kept, k, low, length, BLOCK)
    else:
        mask = at < tl.cdiv(length, 64)
        values = tl.load(coarse + at, mask=mask, other=float("-inf"))
        kept = min(k, tl.cdiv(length, 64))
        _take_best(_ordered(values), mask, at, kept, first, BLOCK_TOP)
        tl.debug_barrier()
        kept = _descend(fine, first, second, kept, k, 0, tl.cdiv(length, 8), BLOCK)
        tl.debug_barrier()
        _descend(votes, second, out, kept, k, low, length, BLOCK)


def select_top(
    planes: torch.Tensor,
    meta: torch.Tensor,
    *,
    top_k: int,
    per_kv_head: bool,
    smoothing: int = 1,
    skip: torch.Tensor | None = None,
    num_warps: int = 16,
) -> torch.Tensor:
    """Selects each chunk's num_selected best positions among its candidates.

    Args:
        planes: Votes [num_planes, num_chunks, length] float32 by position, length a multiple of
            256; -inf where a candidate may not be selected. Summed over planes, unless
            `per_kv_head`.
        meta: [num_chunks, 4] int32: init_end, local_start, num_selected, num_before; num_selected
            is at most the number of candidates that are not -inf.
        top_k: Largest num_selected.
        per_kv_head: Each plane selects for itself.
        smoothing: Odd width of a max-pool over neighbouring candidates' votes.
        skip: Int32 [1]; when it is not 0, nothing is computed.
        num_warps: Warps of the one program that selects for a row.

    Returns:
        [num_chunks, num_sets, top_k] int32 ascending positions, num_selected of them written.
    """
    num_planes, num_chunks, length = planes.shape
    num_sets = num_planes if per_kv_head else 1
    num_rows = num_sets * num_chunks
    has_skip = skip is not None
    fine = planes.new_empty(num_rows, length // 8)
    coarse = planes.new_empty(num_rows, length // 64)
    block = min(2048, padded(length, 64))
    grid = (num_rows, triton.cdiv(length, block))
    summed = planes.shape[0] if not per_kv_head else 1
    votes = planes[0] if summed == 1 else planes.new_empty(num_chunks, length)
    if summed > 1 or smoothing == 1:
        _reduce_kernel[grid](
            planes, votes, fine, coarse, meta, skip, num_rows, length, num_sets,
            NUM_PLANES=summed, WRITE_VOTES=summed > 1, WRITE_MAXIMA=smoothing == 1, WIDTH=1,
            HAS_SKIP=has_skip, BLOCK=block,
        )  # fmt: skip
    if smoothing > 1:
        pooled = planes.new_empty(num_rows, length)
        _reduce_kernel[grid](
            votes, pooled, fine, coarse, meta, skip, num_rows, length, num_sets,
            NUM_PLANES=1, WRITE_VOTES=True, WRITE_MAXIMA=True, WIDTH=smoothing,
            HAS_SKIP=has_skip, BLOCK=block,
        )  # fmt: skip
        votes = pooled
    most = padded(max(BRANCH * top_k, LEAST_BLOCK))
    levels = 1 if length <= most else 2 if length // 8 <= most else 3
    top = padded(length if levels == 1 else length // 8 if levels == 2 else length // 64, 64)
    tiles = torch.empty(num_rows, 2, top_k, dtype=torch.int32, device=planes.device)
    out = torch.empty(num_rows, top_k, dtype=torch.int32, device=planes.device)
    _select_kernel[(num_rows,)](
        votes, fine, coarse, meta, tiles, out, skip, num_rows, length, num_sets, top_k,
        LEVELS=levels, HAS_SKIP=has_skip, BLOCK_TOP=top, BLOCK=padded(BRANCH * top_k, 64),
        num_warps=num_warps,
    )  # fmt: skip
    return out.view(num_sets, num_chunks, top_k).transpose(0, 1)
