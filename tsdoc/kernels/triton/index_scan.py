"""Approximate votes of one decode query from the key index alone (reference: `kernels.index`).

    project   the query onto each KV head's axes: 32 weights of 8 bits, one scale, one offset
    stats     one pass over the codes: each head's log-sum-exp
    votes     a second pass: votes, and the maxima of their tiles for the top-k

No scores reach memory. Codes are multiplied as 8-bit integers, so the tensor cores take them as
they are unpacked: one mask or shift per byte. Bytes for n candidates and G KV heads: 2 · 16 · n · G
read and 4 · n written; at n = 2^20 and G = 4 these are 138 MB: 0.032 ms at 4.25 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.decode_scores import log_sums
from tsdoc.kernels.triton.threshold import arrives_last, store_floor, store_maxima
from tsdoc.kernels.triton.tiles import padded
from tsdoc.kernels.triton.topk import TopSpace

MAGIC = 0x4B400000  # as a float 1.5 · 2^23; with a small integer added, the float has it added too


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexTuning:
    """Sizes that only speed depends on; `programs` per multiprocessor."""

    warps: int = 4
    stages: int = 4
    programs: int = 8
    votes_warps: int = 4


@triton.jit
def _project_kernel(
    query_ptr,  # [num_heads, HEAD_DIM], scaled
    axes_ptr,  # [num_kv, HEAD_DIM, RANK] float32
    centre_ptr,  # [num_kv, HEAD_DIM] float32
    weights_ptr,  # [num_kv, R, RANK] int8 out
    factors_ptr,  # [num_kv, R, 2] float32 out: scale and offset
    skip_ptr,  # int32
    GROUP: tl.constexpr,
    R: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RANK: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    kv_head, row = tl.program_id(0), tl.program_id(1)
    dims, ranks = tl.arange(0, BLOCK_D), tl.arange(0, RANK)
    inside = (dims < HEAD_DIM) & (row < GROUP)
    q = tl.load(query_ptr + (kv_head * GROUP + row) * HEAD_DIM + dims, mask=inside, other=0.0)
    q = q.to(tl.float32)
    at = (kv_head * HEAD_DIM + dims)[:, None] * RANK + ranks[None, :]
    axes = tl.load(axes_ptr + at, mask=inside[:, None], other=0.0)
    centre = tl.load(centre_ptr + kv_head * HEAD_DIM + dims, mask=inside, other=0.0)
    weights = tl.sum(q[:, None] * axes, 0)
    scale = tl.maximum(tl.max(tl.abs(weights), 0), 1e-30) / 127.0
    whole = tl.floor(weights / scale + 0.5)
    # A code stands for the middle of its step: 7.5 steps below the first one is the centre.
    offset = tl.sum(q * centre, 0) - 7.5 * scale * tl.sum(whole, 0)
    place = kv_head * R + row
    tl.store(weights_ptr + place * RANK + ranks, whole.to(tl.int8))
    tl.store(factors_ptr + 2 * place, scale)
    tl.store(factors_ptr + 2 * place + 1, offset)


@triton.jit
def _codes(packed, IN_WORDS: tl.constexpr):
    """The two codes of each byte, as int8; four bytes at a time where they are in one register."""
    if IN_WORDS:
        low = tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )
        high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }", "=r,r", [packed],
            dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = packed & 15, (packed >> 4) & 15
    return low, high


@triton.jit
def _half_scores(
    codes, weights, scale, offset, R: tl.constexpr, HALF: tl.constexpr, MAGIC: tl.constexpr
):
    """Scores [HALF, R] of codes [HALF, RANK] int8 by weights [RANK, R] int8."""
    start = tl.full([HALF, R], MAGIC, tl.int32)
    products = tl.dot(codes, weights, acc=start, out_dtype=tl.int32)
    return (products.to(tl.float32, bitcast=True) - 12582912.0) * scale[None, :] + offset[None, :]


@triton.jit
def _wanted(first, low, high, allowed_ptr, HAS_ALLOWED: tl.constexpr, HALF: tl.constexpr):
    """Which of the positions from `first` on are candidates."""
    positions = first + tl.arange(0, HALF)
    wanted = (positions >= low) & (positions < high)
    if HAS_ALLOWED:
        before = tl.load(allowed_ptr + positions, mask=wanted, other=0)
        wanted = wanted & (tl.load(allowed_ptr + positions + 1, mask=wanted, other=0) > before)
    return wanted


@triton.jit(do_not_specialize=["num_splits", "num_rows"])
def _stats_kernel(
    weights_ptr,  # [num_kv, R, RANK] int8
    factors_ptr,  # [num_kv, R, 2] float32
    codes_ptr,  # [num_kv, num_rows, RANK] int8: two codes a byte
    meta_ptr,  # [1, 4] int32: init_end, local_start, num_selected, num_before
    allowed_ptr,  # [positions + 1] int32, running count of allowed positions
    max_ptr,  # [num_heads, num_splits] float32
    sum_ptr,  # same
    lse_ptr,  # [num_heads] float32
    tickets_ptr,  # [num_kv] int32
    skip_ptr,  # int32
    num_rows,
    num_splits,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    MAGIC: tl.constexpr,
    IN_WORDS: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    kv_head, split = tl.program_id(0), tl.program_id(1)
    low, high = tl.load(meta_ptr), tl.load(meta_ptr + 1)
    rows, ranks, lines = tl.arange(0, R), tl.arange(0, RANK), tl.arange(0, HALF)
    place = kv_head * R + rows
    weights = tl.load(weights_ptr + place[None, :] * RANK + ranks[:, None])
    scale, offset = tl.load(factors_ptr + 2 * place), tl.load(factors_ptr + 2 * place + 1)
    peak = tl.full([HALF, R], float("-inf"), tl.float32)
    total = tl.zeros([HALF, R], tl.float32)
    base = codes_ptr + kv_head.to(tl.int64) * num_rows * RANK
    inner = lines[:, None] * RANK + ranks[None, :]
    for page in range(low // (2 * HALF) + split, tl.cdiv(high, 2 * HALF), num_splits):
        packed = tl.load(base + page * (HALF * RANK) + inner)
        first = page * 2 * HALF
        low_codes, high_codes = _codes(packed, IN_WORDS)
        one = _half_scores(low_codes, weights, scale, offset, R, HALF, MAGIC)
        two = _half_scores(high_codes, weights, scale, offset, R, HALF, MAGIC)
        mask = _wanted(first, low, high, allowed_ptr, HAS_ALLOWED, HALF)
        one = tl.where(mask[:, None], one, float("-inf"))
        mask = _wanted(first + HALF, low, high, allowed_ptr, HAS_ALLOWED, HALF)
        two = tl.where(mask[:, None], two, float("-inf"))
        new_peak = tl.maximum(peak, tl.maximum(one, two))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp2(peak - safe) + tl.exp2(one - safe) + tl.exp2(two - safe)
        peak = new_peak
    top = tl.max(peak, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(total * tl.exp2(peak - safe[None, :]), 0)
    valid = rows < GROUP
    head = kv_head * GROUP + rows
    tl.store(max_ptr + head * num_splits + split, top, mask=valid)
    tl.store(sum_ptr + head * num_splits + split, mass, mask=valid)
    if arrives_last(tickets_ptr + kv_head, num_splits):
        lse = log_sums(max_ptr, sum_ptr, head, valid, num_splits, SPLITS)
        tl.store(lse_ptr + head, lse, mask=valid)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "k"])
def _votes_kernel(
    weights_ptr,  # [num_kv, R, RANK] int8
    factors_ptr,  # [num_kv, R, 2] float32
    codes_ptr,  # [num_kv, num_rows, RANK] int8: two codes a byte
    lse_ptr,  # [num_heads] float32
    votes_ptr,  # [num_rows · 2] float32 out
    maxima_ptr,  # [num_tiles] int32 out
    floors_ptr,  # [1] int32 out
    tickets_ptr,  # [1] int32
    meta_ptr,  # [1, 4] int32: init_end, local_start, num_selected, num_before
    allowed_ptr,  # [positions + 1] int32, running count of allowed positions
    skip_ptr,  # int32
    num_rows,
    num_tiles,
    k,  # tiles whose maxima reach the floor
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    MAGIC: tl.constexpr,
    IN_WORDS: tl.constexpr,
    TILE: tl.constexpr,
    SEARCH: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    low, high = tl.load(meta_ptr), tl.load(meta_ptr + 1)
    # From the end, which the pass before read last and left in the cache.
    page = tl.num_programs(0) - 1 - tl.program_id(0)
    first = page * 2 * HALF
    if (first < high) & (first + 2 * HALF > low):
        rows, ranks, lines = tl.arange(0, R), tl.arange(0, RANK), tl.arange(0, HALF)
        inner = lines[:, None] * RANK + ranks[None, :]
        votes_one = tl.zeros([HALF, R], tl.float32)
        votes_two = tl.zeros([HALF, R], tl.float32)
        for kv_head in tl.static_range(NUM_KV):
            place = kv_head * R + rows
            weights = tl.load(weights_ptr + place[None, :] * RANK + ranks[:, None])
            scale, offset = tl.load(factors_ptr + 2 * place), tl.load(factors_ptr + 2 * place + 1)
            valid = rows < GROUP
            lse = tl.load(lse_ptr + kv_head * GROUP + rows, mask=valid, other=float("inf"))
            # 2^(score - lse): a row without a head gets 0.
            offset = offset - lse
            base = codes_ptr + (kv_head * num_rows + page * HALF).to(tl.int64) * RANK
            packed = tl.load(base + inner)
            low_codes, high_codes = _codes(packed, IN_WORDS)
            one = _half_scores(low_codes, weights, scale, offset, R, HALF, MAGIC)
            two = _half_scores(high_codes, weights, scale, offset, R, HALF, MAGIC)
            votes_one += tl.exp2(one)
            votes_two += tl.exp2(two)
        sum_one, sum_two = tl.sum(votes_one, 1), tl.sum(votes_two, 1)
        mask = _wanted(first, low, high, allowed_ptr, HAS_ALLOWED, HALF)
        tl.store(votes_ptr + first + lines, tl.where(mask, sum_one, float("-inf")))
        store_maxima(sum_one, mask, maxima_ptr, 0, first, num_tiles, HALF, TILE)
        mask = _wanted(first + HALF, low, high, allowed_ptr, HAS_ALLOWED, HALF)
        tl.store(votes_ptr + first + HALF + lines, tl.where(mask, sum_two, float("-inf")))
        store_maxima(sum_two, mask, maxima_ptr, 0, first + HALF, num_tiles, HALF, TILE)
    elif first < high:  # nothing but initial tokens
        tiles = first // TILE + tl.arange(0, 2 * HALF // TILE)
        tl.store(maxima_ptr + tiles, tl.zeros([2 * HALF // TILE], tl.int32))
    if arrives_last(tickets_ptr, tl.num_programs(0)):
        store_floor(maxima_ptr, floors_ptr, 0, num_tiles, high, k, TILE, SEARCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """A query as the index is read with it.

    Attributes:
        weights: [num_kv_heads, R, RANK] int8; R is the group, padded to 8.
        factors: [num_kv_heads, R, 2] float32: scale and offset of the products.
        lse: [num_qo_heads] float32: log2-sum-exp2 of all candidates' approximate scores.
    """

    weights: torch.Tensor
    factors: torch.Tensor
    lse: torch.Tensor


def index_votes(
    query: torch.Tensor,
    axes: torch.Tensor,
    centre: torch.Tensor,
    codes: torch.Tensor,
    meta: torch.Tensor,
    skip: torch.Tensor,
    space: TopSpace,
    tickets: torch.Tensor,
    *,
    floor_tiles: int,
    allowed: torch.Tensor | None = None,
    num_sms: int = 1,
    tuning: IndexTuning | None = None,
) -> tuple[torch.Tensor, Projected]:
    """Approximate votes over the candidates that `meta` names, unless `skip` is set.

    Args:
        query: [num_qo_heads, head_dim], times log2(e) / sqrt(head_dim).
        axes: [num_kv_heads, head_dim, RANK] float32, the basis's.
        centre: [num_kv_heads, head_dim] float32.
        codes: [num_kv_heads, num_pages · 128, RANK] uint8, packed.
        meta: [1, 4] int32: init_end, local_start, num_selected, num_before.
        skip: [1] int32; when it is not 0, nothing is computed.
        space: Of one row; receives maxima, and a floor.
        tickets: [num_kv_heads] int32, zeros before and afterwards.
        floor_tiles: Tiles whose maxima reach the floor, or somewhat more; with fewer tiles there is
            none. At least as many as will be selected.
        allowed: [length + 1] int32, running count of positions that may be selected.
        num_sms: Multiprocessors of the device.
        tuning: Sizes.

    Returns:
        Votes [1, 1, num_pages · 256] float32 by position, -inf where a candidate may not be
        selected, unwritten outside the candidates; and the projected query.
    """
    tuning = tuning or IndexTuning()
    num_heads, head_dim = query.shape
    num_kv, num_rows, rank = codes.shape
    group = num_heads // num_kv
    padded_group = padded(group, 8)
    half = 128
    device = query.device
    weights = torch.empty(num_kv, padded_group, rank, dtype=torch.int8, device=device)
    factors = torch.empty(num_kv, padded_group, 2, device=device)
    _project_kernel[(num_kv, padded_group)](
        query, axes, centre, weights, factors, skip, GROUP=group, R=padded_group,
        HEAD_DIM=head_dim, BLOCK_D=padded(head_dim), RANK=rank,
    )  # fmt: skip
    splits = max(1, tuning.programs * num_sms // num_kv)
    peak = torch.empty(num_heads, splits, device=device)
    total = torch.empty_like(peak)
    lse = torch.empty(num_heads, device=device)
    signed = codes.view(torch.int8)
    in_words = device.type == "cuda"  # the interpreter knows no assembly
    _stats_kernel[(num_kv, splits)](
        weights, factors, signed, meta, allowed, peak, total, lse, tickets, skip, num_rows, splits,
        SPLITS=padded(splits), GROUP=group, R=padded_group, RANK=rank, HALF=half,
        HAS_ALLOWED=allowed is not None, MAGIC=MAGIC, IN_WORDS=in_words,
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    votes = torch.empty(1, 1, 2 * num_rows, device=device)
    _votes_kernel[(num_rows // half,)](
        weights, factors, signed, lse, votes, space.maxima, space.floors, space.tickets[0], meta,
        allowed, skip, num_rows, space.maxima.shape[1], floor_tiles, NUM_KV=num_kv, GROUP=group,
        R=padded_group, RANK=rank, HALF=half, HAS_ALLOWED=allowed is not None, MAGIC=MAGIC,
        IN_WORDS=in_words, TILE=space.tile, SEARCH=2048, num_warps=tuning.votes_warps,
    )  # fmt: skip
    return votes, Projected(weights=weights, factors=factors, lse=lse)
