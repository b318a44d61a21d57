"""Exact top-k of few long rows of votes over many programs: ascending, ties to the lower index.

    maxima   of tiles of `tile` votes, in the pass that makes or reads the votes; the program that
             comes last finds the row's floor: a value that the maxima of at least k tiles reach,
             and with them at least k votes
    count    per block of votes those above the floor and those equal to it
    compact  those above in index order; where they are at most k, these and the first of the
             equal ones are the result; else the program that comes last finds the k-th largest
             of them

A row of n votes has n / tile tiles, 4 k or more, so that the floor keeps little more than k votes:
1.02 k to 1.3 k of independent ones, more where winners stand together, at most 9/8 · k · tile. Per
row, 4 n bytes are read twice (8.4 MB at n = 2^20, in a decode step from the L2 cache), and one
program looks at 4 k to 16 k maxima and at the votes above the floor about ten times each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.threshold import (
    arrives_last,
    find_threshold,
    load_keys,
    ordered,
    store_floor,
    store_maxima,
)
from tsdoc.kernels.triton.tiles import padded

TILES = (8, 32, 128)  # they divide what votes are made in; each costs a compilation
BLOCK = 2048  # votes of one program


@dataclass(frozen=True, slots=True, kw_only=True)
class TopSpace:
    """Work space of a top-k; launches that follow each other share it.

    Attributes:
        tile: Votes of one maximum.
        maxima: [num_rows, length / tile] int32, keys of tiles' maxima.
        floors: [num_rows] int32, key that at least k of the votes reach.
        tickets: [2, ≥ num_rows] int32, zeros between launches.
        counts: [num_rows, length / BLOCK] int32: votes above the floor, votes at it << 16.
        above: [num_rows, 2, room] int32: positions of votes above the floor, and their keys.
    """

    tile: int
    maxima: torch.Tensor
    floors: torch.Tensor
    tickets: torch.Tensor
    counts: torch.Tensor
    above: torch.Tensor


def tile_size(length: int, top_k: int) -> int:
    """Votes of one maximum for rows of `length` votes; only speed depends on it."""
    return max(tile for tile in TILES if tile == TILES[0] or 4 * top_k * tile <= length)


def tiles_holding(count: int, length: int, tile: int) -> int:
    """Tiles that the `count` best of `length` independent votes are expected to lie in.

    The votes that reach the maximum of the last of these tiles are about `count`: where winners
    stand together they are more.
    """
    num_tiles = max(1, length // tile)
    return max(1, round(-num_tiles * math.expm1(-count / num_tiles)))


def make_space(
    num_rows: int, length: int, top_k: int, device: torch.device, *, tile: int | None = None
) -> TopSpace:
    """Work space for rows of up to `length` votes, a multiple of 256.

    Args:
        num_rows: Rows at once.
        length: Votes of a row.
        top_k: Most that are selected.
        device: Where.
        tile: `tile_size` of what rows usually are, where that is less than `length`.
    """

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    tile = tile or tile_size(length, top_k)
    room = min(length, tile * (top_k + top_k // 8))
    return TopSpace(
        tile=tile,
        maxima=ints(num_rows, length // tile),
        floors=ints(num_rows),
        tickets=torch.zeros(2, padded(num_rows, 4), dtype=torch.int32, device=device),
        counts=ints(num_rows, triton.cdiv(length, BLOCK)),
        above=ints(num_rows, 2, room),
    )


@triton.jit(do_not_specialize=["num_chunks", "num_tiles"])
def _reduce_kernel(
    votes_ptr,  # [num_rows, stride] float32 by position
    pooled_ptr,  # [num_rows, stride] float32: smoothed votes, where WIDTH > 1
    maxima_ptr,  # [num_rows, num_tiles] int32
    floors_ptr,  # [num_rows] int32
    tickets_ptr,  # [num_rows] int32
    meta_ptr,  # [num_chunks, 4] int32: init_end, local_start, num_selected, num_before
    skip_ptr,  # int32
    num_chunks,
    stride,
    num_tiles,
    WIDTH: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    TILE: tl.constexpr,
    SIZE: tl.constexpr,
):
    if HAS_SKIP:
        if tl.load(skip_ptr) != 0:
            return
    row = tl.program_id(1)
    meta = meta_ptr + 4 * (row % num_chunks)  # rows are (set, chunk)
    low, high = tl.load(meta), tl.load(meta + 1)
    first = tl.program_id(0) * SIZE
    positions = first + tl.arange(0, SIZE)
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
    store_maxima(votes, mask, maxima_ptr, row, first, num_tiles, SIZE, TILE)
    if arrives_last(tickets_ptr + row, tl.num_programs(0)):
        store_floor(maxima_ptr, floors_ptr, row, num_tiles, high, tl.load(meta + 2), TILE, SIZE)


@triton.jit
def _block_keys(votes_ptr, meta_ptr, row, block, num_chunks, stride, SIZE: tl.constexpr):
    """Positions and keys of a block of a row's votes; keys of other than candidates are 0."""
    meta = meta_ptr + 4 * (row % num_chunks)
    positions = block * SIZE + tl.arange(0, SIZE)
    mask = (positions >= tl.load(meta)) & (positions < tl.load(meta + 1))
    votes = tl.load(votes_ptr + row.to(tl.int64) * stride + positions, mask=mask, other=0.0)
    return positions, ordered(votes, mask)


@triton.jit
def compare(keys, threshold):
    """1 for keys above the threshold, 1 << 16 for those equal to it."""
    above = (keys > threshold).to(tl.int32)
    return above + (((keys == threshold) & (keys > 0)).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["num_chunks"])
def _count_kernel(
    votes_ptr,  # [num_rows, stride] float32
    floors_ptr,  # [num_rows] int32
    counts_ptr,  # [num_rows, num_blocks] int32
    meta_ptr,  # [num_chunks, 4] int32: init_end, local_start, num_selected, num_before
    skip_ptr,  # int32
    num_chunks,
    stride,
    HAS_SKIP: tl.constexpr,
    SIZE: tl.constexpr,
):
    if HAS_SKIP:
        if tl.load(skip_ptr) != 0:
            return
    block, row = tl.program_id(0), tl.program_id(1)
    floor = tl.load(floors_ptr + row).to(tl.uint32, bitcast=True)
    _, keys = _block_keys(votes_ptr, meta_ptr, row, block, num_chunks, stride, SIZE)
    count = tl.sum(compare(keys, floor), 0)
    tl.store(counts_ptr + row * tl.num_programs(0) + block, count)


@triton.jit
def places_of(keys, threshold, base, equal_base, wanted):
    """Which keys are taken, where they go, and this block's counts.

    Taken are those above the threshold and `wanted` equal to it; `base` and `equal_base` of them
    come before.
    """
    own = compare(keys, threshold)
    until = tl.cumsum(own, 0)
    before = (until & 0xFFFF) - (own & 0xFFFF) + base
    equal_before = (until >> 16) - (own >> 16) + equal_base
    taken = ((own & 0xFFFF) > 0) | (((own >> 16) > 0) & (equal_before < wanted))
    return taken, before + tl.minimum(equal_before, wanted), tl.sum(own, 0)


@triton.jit
def take_best(
    ids_ptr, keys_ptr, out_ptr, places_ptr, num_keys, floor, k,
    HAS_PLACES: tl.constexpr, SIZE: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Writes the ids of the k best of `num_keys` keys, all above `floor`, in their order.

    With HAS_PLACES, also which of the keys they are.
    """
    lanes = tl.arange(0, SIZE)
    threshold = find_threshold(keys_ptr, num_keys, floor, k, k, SEARCH)
    num_above = tl.zeros([SIZE], tl.int32)
    for at in range(0, num_keys, SIZE):
        num_above += (load_keys(keys_ptr, at + lanes, num_keys) > threshold).to(tl.int32)
    wanted = k - tl.sum(num_above, 0)
    base = tl.full([], 0, tl.int32)
    equal_base = tl.full([], 0, tl.int32)
    for at in range(0, num_keys, SIZE):
        keys = load_keys(keys_ptr, at + lanes, num_keys)
        taken, places, counts = places_of(keys, threshold, base, equal_base, wanted)
        ids = tl.load(ids_ptr + at + lanes, mask=at + lanes < num_keys, other=0)
        tl.store(out_ptr + places, ids, mask=taken)
        if HAS_PLACES:
            tl.store(places_ptr + places, at + lanes, mask=taken)
        base += counts & 0xFFFF
        equal_base += counts >> 16


@triton.jit(do_not_specialize=["num_chunks", "room", "top_k"])
def _compact_kernel(
    votes_ptr,  # [num_rows, stride] float32
    floors_ptr,  # [num_rows] int32
    counts_ptr,  # [num_rows, num_blocks] int32
    above_ptr,  # [num_rows, 2, room] int32
    tickets_ptr,  # [num_rows] int32
    meta_ptr,  # [num_chunks, 4] int32: init_end, local_start, num_selected, num_before
    out_ptr,  # [num_rows, top_k] int32
    skip_ptr,  # int32
    num_chunks,
    stride,
    room,
    top_k,
    HAS_SKIP: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    if HAS_SKIP:
        if tl.load(skip_ptr) != 0:
            return
    block, row = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.num_programs(0)
    k = tl.load(meta_ptr + 4 * (row % num_chunks) + 2)
    numbers = tl.arange(0, BLOCKS)
    counts = tl.load(counts_ptr + row * num_blocks + numbers, mask=numbers < num_blocks, other=0)
    num_above = tl.sum(counts & 0xFFFF, 0)
    counts = tl.where(numbers < block, counts, 0)
    base, equal_base = tl.sum(counts & 0xFFFF, 0), tl.sum(counts >> 16, 0)
    wanted = tl.maximum(k - num_above, 0)

    floor = tl.load(floors_ptr + row).to(tl.uint32, bitcast=True)
    positions, keys = _block_keys(votes_ptr, meta_ptr, row, block, num_chunks, stride, SIZE)
    taken, places, _ = places_of(keys, floor, base, equal_base, wanted)
    out = out_ptr + row * top_k
    above = above_ptr + row.to(tl.int64) * 2 * room
    if num_above <= k:
        tl.store(out + places, positions, mask=taken)
    else:
        tl.store(above + places, positions, mask=taken)
        tl.store(above + room + places, keys.to(tl.int32, bitcast=True), mask=taken)
        if arrives_last(tickets_ptr + row, num_blocks):
            take_best(above, above + room, out, out, num_above, floor, k, False, SIZE, 2 * SIZE)


def select_top(
    votes: torch.Tensor,
    meta: torch.Tensor,
    *,
    top_k: int,
    smoothing: int = 1,
    space: TopSpace | None = None,
    is_reduced: bool = True,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """Selects each chunk's num_selected best positions among its candidates.

    Args:
        votes: [num_sets, num_chunks, length] float32 by position, length a multiple of 256; -inf
            where a candidate may not be selected.
        meta: [num_chunks, 4] int32: init_end, local_start, num_selected, num_before; num_selected
            is at most the number of candidates that are not -inf.
        top_k: Largest num_selected.
        smoothing: Odd width of a max-pool over neighbouring candidates' votes.
        space: Work space in which maxima and floors of these votes are known already; with
            smoothing, those of the smoothed ones are found anew.
        is_reduced: Whether they are known; else `space` is only room.
        skip: Int32 [1]; when it is not 0, nothing is computed.

    Returns:
        [num_chunks, num_sets, top_k] int32 ascending positions, num_selected of them written.
    """
    num_sets, num_chunks, length = votes.shape
    num_rows = num_sets * num_chunks
    has_skip = skip is not None
    is_known = space is not None and is_reduced and smoothing == 1
    if space is None:
        space = make_space(num_rows, length, top_k, votes.device)
    if not is_known:
        pooled = torch.empty_like(votes) if smoothing > 1 else votes
        _reduce_kernel[(triton.cdiv(length, BLOCK), num_rows)](
            votes, pooled, space.maxima, space.floors, space.tickets[0], meta, skip, num_chunks,
            length, space.maxima.shape[1], WIDTH=smoothing, HAS_SKIP=has_skip, TILE=space.tile,
            SIZE=BLOCK, num_warps=8,
        )  # fmt: skip
        votes = pooled
    out = torch.empty(num_rows, top_k, dtype=torch.int32, device=votes.device)
    num_blocks = triton.cdiv(length, BLOCK)
    _count_kernel[(num_blocks, num_rows)](
        votes, space.floors, space.counts, meta, skip, num_chunks, length, HAS_SKIP=has_skip,
        SIZE=BLOCK, num_warps=8,
    )  # fmt: skip
    _compact_kernel[(num_blocks, num_rows)](
        votes, space.floors, space.counts, space.above, space.tickets[1], meta, out, skip,
        num_chunks, length, space.above.shape[2], top_k, HAS_SKIP=has_skip,
        BLOCKS=padded(num_blocks, 512), SIZE=BLOCK, num_warps=8,
    )  # fmt: skip
    return out.view(num_sets, num_chunks, top_k).transpose(0, 1)
