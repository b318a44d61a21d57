"""Exact top-k over long rows of votes: ascending indices, ties to the lower index.

The k largest elements lie within the k tiles of 8 that have the largest maxima (of equal maxima
the earlier tile; each of those tiles has an element that beats all of any other tile). So votes
are reduced to maxima of 8 and of 64, the k best of the few thousand coarsest are found, then the
k best of the 8 k below them, down to the votes. Every step looks at about 8 k keys: one program
finds the k-th largest of them, two bits at a time, and compacts in index order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.tiles import padded

BRANCH = 8  # elements per tile, at every level
LEAST_BLOCK = 1024  # keys that are searched in one step however small k is


@triton.jit
def store_maxima(votes, fine_ptr, coarse_ptr, row, first, stride, BLOCK: tl.constexpr):
    """Stores the maxima of 8 and of 64 of `votes` [BLOCK], which begin at position `first`."""
    fine = tl.max(tl.reshape(votes, [BLOCK // 8, 8]), 1)
    at = first // 8 + tl.arange(0, BLOCK // 8)
    tl.store(fine_ptr + row.to(tl.int64) * (stride // 8) + at, fine, mask=at < stride // 8)
    coarse = tl.max(tl.reshape(fine, [BLOCK // 64, 8]), 1)
    at = first // 64 + tl.arange(0, BLOCK // 64)
    tl.store(coarse_ptr + row.to(tl.int64) * (stride // 64) + at, coarse, mask=at < stride // 64)


@triton.jit
def _reduce_kernel(
    votes_ptr,  # [num_rows, stride] float32 by position
    pooled_ptr,  # [num_rows, stride] float32: smoothed votes, where WIDTH > 1
    fine_ptr,  # [num_rows, stride / 8] float32 maxima
    coarse_ptr,  # [num_rows, stride / 64] float32 maxima
    meta_ptr,  # [num_chunks, 4] int32: init_end, local_start, num_selected, num_before
    skip_ptr,  # int32
    num_rows,
    stride,
    num_sets,
    WIDTH: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if HAS_SKIP:
        if tl.load(skip_ptr) != 0:
            return
    row = tl.program_id(0)
    chunk = row % (num_rows // num_sets)  # rows are (set, chunk)
    low = tl.load(meta_ptr + 4 * chunk)
    high = tl.load(meta_ptr + 4 * chunk + 1)
    first = tl.program_id(1) * BLOCK
    positions = first + tl.arange(0, BLOCK)
    mask = (positions >= low) & (positions < high)
    base = votes_ptr + row.to(tl.int64) * stride
    votes = tl.load(base + positions, mask=mask, other=float("-inf"))
    if WIDTH > 1:
        own = votes
        for offset in tl.static_range(WIDTH):
            near = positions + (offset - WIDTH // 2)
            inside = (near >= low) & (near < high)
            votes = tl.maximum(votes, tl.load(base + near, mask=inside, other=float("-inf")))
        votes = tl.where(own == float("-inf"), own, votes)
        target = pooled_ptr + row.to(tl.int64) * stride + positions
        tl.store(target, votes, mask=positions < stride)
    store_maxima(votes, fine_ptr, coarse_ptr, row, first, stride, BLOCK)


@triton.jit
def _ordered(values, mask):
    """Float32 to uint32 keys of the same order, above 0; -0 and 0 are equal; masked-out are 0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = flipped.to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(mask, keys, tl.zeros_like(keys))


@triton.jit
def _find_threshold(keys_ptr, num_keys, k, TILE: tl.constexpr):
    """Largest threshold that at least k of `num_keys` keys reach; any that exactly k reach will do.

    Two bits at a time, from the highest down. The keys stay in the L1 cache and the loops are
    short: a program that runs once is bound by fetching its own instructions.
    """
    threshold = tl.full([], 0, tl.uint32)
    one = tl.full([], 1, tl.uint32)
    shift = tl.full([], 30, tl.int32)
    found = tl.full([], -1, tl.int32)
    lanes = tl.arange(0, TILE)
    while (shift >= 0) & (found != k):
        first = threshold | (one << shift.to(tl.uint32))
        second = threshold | ((one + one) << shift.to(tl.uint32))
        third = first | second
        packed = tl.zeros([TILE], tl.int32)  # three counts of at most 1023
        for at in range(0, num_keys, TILE):
            keys = tl.load(keys_ptr + at + lanes).to(tl.uint32, bitcast=True)
            packed += (keys >= first).to(tl.int32)
            packed += (keys >= second).to(tl.int32) << 10
            packed += (keys >= third).to(tl.int32) << 20
        wide = (packed & 1023).to(tl.int64) + (((packed >> 10) & 1023).to(tl.int64) << 20)
        counts = tl.sum(wide + ((packed >> 20).to(tl.int64) << 40), 0)
        count = (counts >> 40).to(tl.int32)
        if count >= k:
            threshold = third
            found = count
        else:
            count = ((counts >> 20) & 0xFFFFF).to(tl.int32)
            if count >= k:
                threshold = second
                found = count
            else:
                count = (counts & 0xFFFFF).to(tl.int32)
                if count >= k:
                    threshold = first
                    found = count
        shift -= 2
    return threshold


@triton.jit
def _take_best(
    values_ptr,  # [high] float32
    tiles_ptr,  # [num_keys / 8] int32: tiles of 8 to look at, ascending; unused where ALL
    keys_ptr,  # [≥ num_keys, rounded up to TILE] int32, work space
    out_ptr,  # [k] int32
    num_keys,
    k,
    low,
    high,
    ALL: tl.constexpr,  # look at [0, num_keys) instead of tiles
    TILE: tl.constexpr,
):
    """Writes, ascending, the ids of the k best of [low, high); returns how many there are."""
    lanes = tl.arange(0, TILE)
    num_valid = tl.zeros([TILE], tl.int32)
    for at in range(0, num_keys, TILE):
        ids, mask = _listed(tiles_ptr, at + lanes, num_keys, low, high, ALL)
        values = tl.load(values_ptr + ids, mask=mask, other=0.0)
        tl.store(keys_ptr + at + lanes, _ordered(values, mask).to(tl.int32, bitcast=True))
        num_valid += mask.to(tl.int32)
    kept = tl.minimum(k, tl.sum(num_valid, 0))
    tl.debug_barrier()
    threshold = _find_threshold(keys_ptr, num_keys, kept, TILE)
    num_above = tl.zeros([TILE], tl.int32)
    for at in range(0, num_keys, TILE):
        keys = tl.load(keys_ptr + at + lanes).to(tl.uint32, bitcast=True)
        num_above += (keys > threshold).to(tl.int32)
    wanted = kept - tl.sum(num_above, 0)
    base = tl.full([], 0, tl.int32)
    equal_base = tl.full([], 0, tl.int32)
    for at in range(0, num_keys, TILE):
        keys = tl.load(keys_ptr + at + lanes).to(tl.uint32, bitcast=True)
        above = (keys > threshold).to(tl.int32)
        equal = ((keys == threshold) & (keys > 0)).to(tl.int32)
        packed = tl.cumsum(above + (equal << 16), 0)  # a tile's counts fit 16 bits
        before = (packed & 0xFFFF) - above + base
        equal_before = (packed >> 16) - equal + equal_base
        taken = (above > 0) | ((equal > 0) & (equal_before < wanted))
        ids, _ = _listed(tiles_ptr, at + lanes, num_keys, low, high, ALL)
        tl.store(out_ptr + before + tl.minimum(equal_before, wanted), ids, mask=taken)
        base += tl.sum(above, 0)
        equal_base += tl.sum(equal, 0)
    tl.debug_barrier()  # the next level reads the list
    return kept


@triton.jit
def _listed(tiles_ptr, at, num_keys, low, high, ALL: tl.constexpr):
    """Ids of the elements number `at`, and which of them are in [low, high)."""
    if ALL:
        ids = at
    else:
        ids = tl.load(tiles_ptr + at // 8, mask=at < num_keys, other=0) * 8 + at % 8
    return ids, (at < num_keys) & (ids >= low) & (ids < high)


@triton.jit
def _select_kernel(
    votes_ptr,  # [num_rows, stride] float32
    fine_ptr,  # [num_rows, stride / 8] float32 maxima
    coarse_ptr,  # [num_rows, stride / 64] float32 maxima
    meta_ptr,  # [num_chunks, 4] int32: init_end, local_start, num_selected, num_before
    tiles_ptr,  # [num_rows, 2, top_k] int32, work space
    keys_ptr,  # [num_rows, space] int32, work space
    out_ptr,  # [num_rows, top_k] int32
    skip_ptr,  # int32
    num_rows,
    stride,
    num_sets,
    top_k,
    space,
    LEVELS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    TILE: tl.constexpr,
):
    if HAS_SKIP:
        if tl.load(skip_ptr) != 0:
            return
    row = tl.program_id(0)
    chunk = row % (num_rows // num_sets)
    low = tl.load(meta_ptr + 4 * chunk)
    high = tl.load(meta_ptr + 4 * chunk + 1)
    k = tl.load(meta_ptr + 4 * chunk + 2)
    votes = votes_ptr + row.to(tl.int64) * stride
    fine = fine_ptr + row.to(tl.int64) * (stride // 8)
    coarse = coarse_ptr + row.to(tl.int64) * (stride // 64)
    keys = keys_ptr + row.to(tl.int64) * space
    first = tiles_ptr + row * 2 * top_k
    second = first + top_k
    out = out_ptr + row * top_k
    num_fine, num_coarse = tl.cdiv(high, 8), tl.cdiv(high, 64)
    if LEVELS == 1:
        _take_best(votes, first, keys, out, high, k, low, high, True, TILE)
    elif LEVELS == 2:
        kept = _take_best(fine, first, keys, first, num_fine, k, 0, num_fine, True, TILE)
        _take_best(votes, first, keys, out, kept * 8, k, low, high, False, TILE)
    else:
        kept = _take_best(coarse, first, keys, first, num_coarse, k, 0, num_coarse, True, TILE)
        kept = _take_best(fine, first, keys, second, kept * 8, k, 0, num_fine, False, TILE)
        _take_best(votes, second, keys, out, kept * 8, k, low, high, False, TILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Maxima:
    """Maxima of votes over tiles of 8 and of 64 positions.

    Attributes:
        fine: [num_rows, length / 8] float32.
        coarse: [num_rows, length / 64] float32.
    """

    fine: torch.Tensor
    coarse: torch.Tensor


def empty_maxima(num_rows: int, length: int, device: torch.device) -> Maxima:
    """Room for the maxima of rows of `length` votes."""
    return Maxima(
        fine=torch.empty(num_rows, length // 8, device=device),
        coarse=torch.empty(num_rows, length // 64, device=device),
    )


def select_top(
    votes: torch.Tensor,
    meta: torch.Tensor,
    *,
    top_k: int,
    smoothing: int = 1,
    maxima: Maxima | None = None,
    skip: torch.Tensor | None = None,
    num_warps: int = 16,
) -> torch.Tensor:
    """Selects each chunk's num_selected best positions among its candidates.

    Args:
        votes: [num_sets, num_chunks, length] float32 by position, length a multiple of 256; -inf
            where a candidate may not be selected.
        meta: [num_chunks, 4] int32: init_end, local_start, num_selected, num_before; num_selected
            is at most the number of candidates that are not -inf.
        top_k: Largest num_selected.
        smoothing: Odd width of a max-pool over neighbouring candidates' votes.
        maxima: Of the votes, where they are known already; not together with smoothing.
        skip: Int32 [1]; when it is not 0, nothing is computed.
        num_warps: Warps of the one program that selects for a row.

    Returns:
        [num_chunks, num_sets, top_k] int32 ascending positions, num_selected of them written.
    """
    num_sets, num_chunks, length = votes.shape
    num_rows = num_sets * num_chunks
    has_skip = skip is not None
    if maxima is None or smoothing > 1:
        maxima = empty_maxima(num_rows, length, votes.device)
        pooled = torch.empty_like(votes) if smoothing > 1 else votes
        block = min(2048, padded(length, 64))
        _reduce_kernel[(num_rows, triton.cdiv(length, block))](
            votes, pooled, maxima.fine, maxima.coarse, meta, skip, num_rows, length, num_sets,
            WIDTH=smoothing, HAS_SKIP=has_skip, BLOCK=block,
        )  # fmt: skip
        votes = pooled
    most = max(BRANCH * top_k, LEAST_BLOCK)
    levels = 1 if length <= most else 2 if length // 8 <= most else 3
    tile = 128 * num_warps
    longest = (length, length // 8, length // 64)[levels - 1]
    space = triton.cdiv(max(longest, BRANCH * top_k), tile) * tile
    tiles = torch.empty(num_rows, 2, top_k, dtype=torch.int32, device=votes.device)
    keys = torch.empty(num_rows, space, dtype=torch.int32, device=votes.device)
    out = torch.empty(num_rows, top_k, dtype=torch.int32, device=votes.device)
    _select_kernel[(num_rows,)](
        votes, maxima.fine, maxima.coarse, meta, tiles, keys, out, skip, num_rows, length,
        num_sets, top_k, space, LEVELS=levels, HAS_SKIP=has_skip, TILE=tile, num_warps=num_warps,
    )  # fmt: skip
    return out.view(num_sets, num_chunks, top_k).transpose(0, 1)
