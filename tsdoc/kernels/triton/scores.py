"""Paged selection scores of a prefill block: votes [num_chunks, positions] in two passes over K.

All chunks of a block are scored together, each masked to its own candidates:

    pass 1  running maximum and sum of every (query head, chunk), split over the positions
    combine one log2-sum-exp2 per (query head, chunk)
    pass 2  scores again, probabilities, and their sum over the query heads: the votes

No score reaches memory. Rows of the left operand are (chunk, query head of the group), padded to
powers of two and ordered so that a group's rows meet in one thread of the matrix unit's layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.tiles import LOG2_E, PAGE_SIZE, first_row, padded, precision

MAX_ROWS = 128  # (chunk, head) rows of one tile


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTuning:
    """Tile sizes; any choice gives the same votes up to rounding.

    Attributes:
        stats_block: Keys per tile of pass 1.
        stats_registers: Limit per thread, so that several programs share a multiprocessor.
        stats_programs: Programs of pass 1 per multiprocessor.
        votes_block: Keys per tile of pass 2.
        votes_tiles: Tiles that a program of pass 2 takes through all KV heads at a time.
        votes_programs: Programs of pass 2 per multiprocessor.
    """

    stats_block: int = 128
    stats_warps: int = 4
    stats_stages: int = 2
    stats_registers: int | None = None
    stats_programs: int = 2
    votes_block: int = 128
    votes_warps: int = 4
    votes_stages: int = 2
    votes_registers: int | None = None
    votes_tiles: int = 4
    votes_programs: int = 2


@triton.jit
def _row_chunk(rows, R: tl.constexpr, GP: tl.constexpr, WIDE: tl.constexpr):
    """Chunk of each row of the tile; see `_sum_groups`."""
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
    """Which query head of the group each row of the tile is; see `_sum_groups`."""
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
def _sum_groups(p, R: tl.constexpr, GP: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr):
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
def _load_queries(q_ptr, chunk, head, valid, dims, num_heads, HEAD_DIM: tl.constexpr):
    source = (chunk * num_heads + head)[:, None] * HEAD_DIM + dims[None, :]
    return tl.load(q_ptr + source, mask=valid[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _load_keys(
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
def _candidates(
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
def _stats_kernel(
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
    kv_head, split, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tl.arange(0, R)
    chunk = batch * (R // GP) + _row_chunk(rows, R, GP, WIDE)
    member = _row_member(rows, R, GP, WIDE)
    valid = (chunk < num_chunks) & (member < GROUP)
    head = kv_head * GROUP + member
    dims = tl.arange(0, BLOCK_D)
    q = _load_queries(q_ptr, chunk, head, valid, dims, num_heads, HEAD_DIM)
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
        k = _load_keys(
            keys_ptr, page_table_ptr, inner_begin * BLOCK_N, kv_head, dims,
            NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE,
        )  # fmt: skip
        peak = tl.max(tl.dot(q, k.to(q.dtype), input_precision=PRECISION), 1)
        for tile in range(inner_begin, inner_end):
            k = _load_keys(
                keys_ptr, page_table_ptr, tile * BLOCK_N, kv_head, dims,
                NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE,
            )  # fmt: skip
            scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
            total += tl.sum(tl.exp2(scores - peak[:, None]), 1)
        if tl.max(total, 0) == float("inf"):
            total = tl.zeros([R], tl.float32)
            for tile in range(inner_begin, inner_end):
                k = _load_keys(
                    keys_ptr, page_table_ptr, tile * BLOCK_N, kv_head, dims,
                    NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE,
                )  # fmt: skip
                scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
                new_peak = tl.maximum(peak, tl.max(scores, 1))
                total = total * tl.exp2(peak - new_peak)
                total += tl.sum(tl.exp2(scores - new_peak[:, None]), 1)
                peak = new_peak
    # The tiles before and behind the inner ones, where chunks differ in what they may select.
    num_before = tl.maximum(tl.minimum(tile_inner, tile_high) - tile_low, 0)
    behind = tl.maximum(tile_outer, tile_low + num_before)
    for number in range(split, num_before + tl.maximum(tile_high - behind, 0), num_splits):
        tile = tl.where(number < num_before, tile_low + number, behind + number - num_before)
        k = _load_keys(
            keys_ptr, page_table_ptr, tile * BLOCK_N, kv_head, dims,
            NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE,
        )  # fmt: skip
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        mask = _candidates(allowed_ptr, tile * BLOCK_N, low, high, valid, HAS_ALLOWED, BLOCK_N)
        scores = tl.where(mask, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # Rows without a candidate so far stay at -inf and 0.
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp2(peak - safe) + tl.sum(tl.exp2(scores - safe[:, None]), 1)
        peak = new_peak
    target = (chunk * num_heads + head) * num_splits + split
    tl.store(max_ptr + target, peak, mask=valid)
    tl.store(sum_ptr + target, total, mask=valid)


@triton.jit
def _combine_kernel(
    max_ptr,  # [num_rows, num_splits] float32
    sum_ptr,  # same
    out_ptr,  # [num_rows] float32
    skip_ptr,  # int32
    num_splits,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if HAS_SKIP:
        if tl.load(skip_ptr) != 0:
            return
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


def combine_stats(
    peak: torch.Tensor, total: torch.Tensor, skip: torch.Tensor | None = None
) -> torch.Tensor:
    """Log2-sum-exp2 per row from its splits' maxima and sums.

    Args:
        peak: [..., num_splits] float32, contiguous.
        total: Same; relative to its split's maximum.
        skip: Int32 [1]; when it is not 0, the result stays undefined.

    Returns:
        [...] float32; inf for rows without candidates.
    """
    out = torch.empty(peak.shape[:-1], device=peak.device)
    _combine_kernel[(out.numel(),)](
        peak,
        total,
        out,
        skip,
        peak.shape[-1],
        HAS_SKIP=skip is not None,
        BLOCK=padded(peak.shape[-1]),
        num_warps=1,
    )
    return out


@triton.jit
def _votes_kernel(
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
    SOFT: tl.constexpr,
    HEADS: tl.constexpr,  # KV heads per plane
    TILES: tl.constexpr,
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
    rows = tl.arange(0, R)
    chunk = batch * (R // GP) + _row_chunk(rows, R, GP, WIDE)
    member = _row_member(rows, R, GP, WIDE)
    valid = (chunk < num_chunks) & (member < GROUP)
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    out_chunk = batch * (R // GP) + tl.arange(0, R // GP)
    out_row = (plane * num_chunks + out_chunk).to(tl.int64)[:, None] * stride
    out_mask = (out_chunk < num_chunks)[:, None]

    # A few tiles at a time go through all heads: their votes grow in the L2 cache meanwhile.
    first = tile_inner + split * TILES
    for group in range(first, tile_outer, num_splits * TILES):
        for number in tl.range(HEADS, num_stages=1):
            kv_head = plane * HEADS + number
            head = kv_head * GROUP + member
            q = _load_queries(q_ptr, chunk, head, valid, dims, num_heads, HEAD_DIM)
            if SOFT:  # padding rows get probability 0
                lse = tl.load(lse_ptr + chunk * num_heads + head, mask=valid, other=float("inf"))
            for tile in range(group, tl.minimum(group + TILES, tile_outer)):
                target = votes_ptr + out_row + (tile * BLOCK_N + columns)[None, :]
                if HEADS > 1:
                    so_far = tl.load(target, mask=out_mask & (number > 0), other=0.0)
                k = _load_keys(
                    keys_ptr, page_table_ptr, tile * BLOCK_N, kv_head, dims,
                    NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE,
                )  # fmt: skip
                scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
                if SOFT:
                    scores = tl.exp2(scores - lse[:, None])
                votes = _sum_groups(scores, R, GP, WIDE, BLOCK_N)
                if HEADS > 1:
                    votes += so_far
                tl.store(target, votes, mask=out_mask)
            if HEADS > 1:
                tl.debug_barrier()  # what one warp wrote, another may read


@triton.jit
def _border_votes_kernel(
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
    rows = tl.arange(0, R)
    chunk = batch * (R // GP) + _row_chunk(rows, R, GP, WIDE)
    member = _row_member(rows, R, GP, WIDE)
    valid = (chunk < num_chunks) & (member < GROUP)
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    out_chunk = batch * (R // GP) + tl.arange(0, R // GP)
    out_row = (plane * num_chunks + out_chunk).to(tl.int64)[:, None] * stride
    out_mask = (out_chunk < num_chunks)[:, None]

    low = tl.load(meta_ptr + 4 * (num_chunks - 1))
    high = tl.load(meta_ptr + 4 * chunk + 1, mask=valid, other=0)
    num_before = tl.maximum(tl.minimum(tile_inner, tile_high) - tile_low, 0)
    behind = tl.maximum(tile_outer, tile_low + num_before)
    for number in range(split, num_before + tl.maximum(tile_high - behind, 0), num_splits):
        tile = tl.where(number < num_before, tile_low + number, behind + number - num_before)
        mask = _candidates(allowed_ptr, tile * BLOCK_N, low, high, valid, HAS_ALLOWED, BLOCK_N)
        votes = tl.zeros([R // GP, BLOCK_N], tl.float32)
        for which in tl.range(HEADS, num_stages=1):
            kv_head = plane * HEADS + which
            head = kv_head * GROUP + member
            q = _load_queries(q_ptr, chunk, head, valid, dims, num_heads, HEAD_DIM)
            k = _load_keys(
                keys_ptr, page_table_ptr, tile * BLOCK_N, kv_head, dims,
                NUM_KV, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE,
            )  # fmt: skip
            scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
            if SOFT:
                lse = tl.load(lse_ptr + chunk * num_heads + head, mask=valid, other=float("inf"))
                scores = tl.exp2(scores - lse[:, None])
            votes += _sum_groups(tl.where(mask, scores, 0.0), R, GP, WIDE, BLOCK_N)
        allowed = _sum_groups(mask.to(tl.float32), R, GP, WIDE, BLOCK_N) > 0
        target = out_row + (tile * BLOCK_N + columns)[None, :]
        tl.store(votes_ptr + target, tl.where(allowed, votes, float("-inf")), mask=out_mask)


def block_votes(
    q: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    meta: torch.Tensor,
    *,
    low: int,
    common_high: int,
    high: int,
    per_kv_head: bool,
    soft: bool = True,
    allowed: torch.Tensor | None = None,
    num_sms: int = 1,
    tuning: ScoreTuning | None = None,
) -> torch.Tensor:
    """Votes of several chunks for the positions [low, high).

    Args:
        q: Selection queries [num_chunks, num_qo_heads, head_dim] in the type of the products.
        keys: [num_slots, num_kv_heads, head_dim] pool.
        page_table: [num_pages] int32.
        meta: [num_chunks, 4] int32: init_end, local_start, num_selected, num_before.
        low: Smallest init_end, that of the last chunk included: all chunks that have candidates
            begin there.
        common_high: Least local_start.
        high: Largest local_start.
        per_kv_head: One set of votes per KV head, instead of their sum.
        soft: Sum of softmax probabilities; False is the sum of scaled scores.
        allowed: [≥ high + 1] int32, running count of positions that may be selected.
        num_sms: Multiprocessors of the device.
        tuning: Tile sizes.

    Returns:
        [num_sets, num_chunks, length] float32 indexed by position. Outside a chunk's candidates
        they are -inf or unwritten.
    """
    tuning = tuning or ScoreTuning()
    num_chunks, num_heads, head_dim = q.shape
    num_kv = keys.shape[1]
    group = num_heads // num_kv
    gp = padded(group)
    chunk_rows = min(padded(num_chunks, max(1, 16 // gp)), max(1, MAX_ROWS // gp))
    rows = chunk_rows * gp
    num_batches = triton.cdiv(num_chunks, chunk_rows)
    scale = head_dim**-0.5 * (LOG2_E if soft else 1.0)
    scaled = (q.float() * scale).to(q.dtype)
    length = triton.cdiv(high, PAGE_SIZE) * PAGE_SIZE
    exact = q.dtype == torch.float32
    constants = {
        "GROUP": group,
        "GP": gp,
        "R": rows,
        "NUM_KV": num_kv,
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim, 16),
        "HAS_ALLOWED": allowed is not None,
        "PRECISION": precision(q.dtype),
        "PAGE": PAGE_SIZE,
    }

    def tiles(size: int) -> tuple[int, int, int, int]:
        first, last = low // size, triton.cdiv(high, size)
        if allowed is not None:  # every tile takes the masked way
            return first, last, last, last
        inner = min(triton.cdiv(low, size), last)
        return first, inner, max(inner, common_high // size), last

    lse = None
    if soft:
        size = min(tuning.stats_block, 32) if exact else tuning.stats_block
        num_tiles = tiles(size)[3] - tiles(size)[0]
        splits = max(1, num_sms * tuning.stats_programs // (num_kv * num_batches))
        splits = min(splits, num_tiles)
        peak = torch.empty(num_chunks, num_heads, splits, device=q.device)
        total = torch.empty_like(peak)
        _stats_kernel[(num_kv, splits, num_batches)](
            scaled, keys, page_table, meta, allowed, peak, total,
            num_chunks, num_heads, splits, *tiles(size), WIDE=False,
            BLOCK_N=size, num_warps=tuning.stats_warps, maxnreg=tuning.stats_registers,
            num_stages=1 if exact else tuning.stats_stages, **constants,
        )  # fmt: skip
        lse = combine_stats(peak, total)
    size = min(tuning.votes_block, 32) if exact else tuning.votes_block
    num_sets = num_kv if per_kv_head else 1
    splits = max(1, num_sms * tuning.votes_programs // (num_sets * num_batches))
    # As many tiles at a time as leave every program something to do.
    share = (tiles(size)[2] - tiles(size)[1]) // splits
    group_tiles = max(t for t in (1, 2, 4, 8, 16) if t <= max(1, min(share, tuning.votes_tiles)))
    votes = torch.empty(num_sets, num_chunks, length, device=q.device)
    low_tile, inner, outer, high_tile = tiles(size)
    wide = rows == 128 and tuning.votes_warps == 4
    shared = {"SOFT": soft, "HEADS": num_kv // num_sets, "WIDE": wide, "BLOCK_N": size}
    if outer > inner:
        skipped = ("HAS_ALLOWED",)
        _votes_kernel[(num_sets, splits, num_batches)](
            scaled, keys, page_table, lse, votes, num_chunks, num_heads, length, inner, outer,
            TILES=group_tiles, num_warps=tuning.votes_warps, maxnreg=tuning.votes_registers,
            num_stages=1 if exact else tuning.votes_stages, **shared,
            **{name: value for name, value in constants.items() if name not in skipped},
        )  # fmt: skip
    # Smaller tiles for the few at the border, so that more programs share them.
    part = min(size, 64)
    low_tile, inner, outer, high_tile = (
        edge * (size // part) for edge in (low_tile, inner, outer, high_tile)
    )
    num_border = inner - low_tile + high_tile - max(outer, inner)
    if num_border > 0:
        shared["BLOCK_N"] = part
        programs = min(num_border, num_sms * tuning.votes_programs)
        _border_votes_kernel[(num_sets, programs, num_batches)](
            scaled, keys, page_table, meta, allowed, lse, votes, num_chunks, num_heads, length,
            low_tile, inner, outer, high_tile, num_warps=tuning.votes_warps, num_stages=1,
            **shared, **constants,
        )  # fmt: skip
    return votes
