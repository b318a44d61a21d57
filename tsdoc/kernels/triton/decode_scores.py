"""Votes of one decode query: one pass over K, which is memory-bound, then one over the scores.

Bytes for n candidates, H query heads, G KV heads of d numbers of 2 bytes: K 2·n·G·d, scores
written and read 8·n·H, votes 4·n. At n = 2^20 and Qwen2-7B's shape (28, 4, 128) these are 1,074 +
235 + 4 MB: 0.305 ms at 4.3 TB/s, less what of the scores stays in the L2 cache. For that, all
programs together score the tiles in order of position, and scores are read from the end. They must
be kept: a head's weight in the votes is known only when all its scores are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.threshold import arrives_last, store_floor, store_maxima
from tsdoc.kernels.triton.tiles import PAGE_SIZE, add_exp2, first_row, padded, precision
from tsdoc.kernels.triton.topk import TopSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuning:
    """Tile sizes; any choice gives the same votes up to rounding.

    Attributes:
        block: Keys per tile.
        programs: Programs per multiprocessor.
        votes_block: Positions whose votes one program adds up, a power of two.
    """

    block: int = 64
    warps: int = 4
    stages: int = 6
    programs: int = 4
    votes_block: int = 256
    votes_warps: int = 4


@triton.jit
def log_sums(max_ptr, sum_ptr, heads, inside, num_splits, SPLITS: tl.constexpr):
    """Log2-sum-exp2 of each head from its splits' maxima and sums; inf without candidates."""
    splits = tl.arange(0, SPLITS)
    at = heads[:, None] * num_splits + splits[None, :]
    mask = inside[:, None] & (splits < num_splits)[None, :]
    peak = tl.load(max_ptr + at, mask=mask, other=float("-inf"))
    total = tl.load(sum_ptr + at, mask=mask, other=0.0)
    top = tl.max(peak, 1)
    safe = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(total * tl.exp2(peak - safe[:, None]), 1)
    return tl.where(mass > 0, safe + tl.log2(tl.where(mass > 0, mass, 1.0)), float("inf"))


@triton.jit(do_not_specialize=["num_splits"])
def _logits_kernel(
    q_ptr,  # [num_heads, HEAD_DIM], scaled
    keys_ptr,  # [num_slots, NUM_KV, HEAD_DIM]
    page_table_ptr,  # [num_pages] int32
    meta_ptr,  # [1, 4] int32: init_end, local_start, num_selected, num_before
    allowed_ptr,  # [positions + 1] int32, running count of allowed positions
    logits_ptr,  # [num_heads, stride] float32
    max_ptr,  # [num_heads, num_splits] float32
    sum_ptr,  # same
    lse_ptr,  # [num_heads] float32
    tickets_ptr,  # [num_kv] int32
    skip_ptr,  # int32
    stride,
    num_splits,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    kv_head, split = tl.program_id(0), tl.program_id(1)
    low, high = tl.load(meta_ptr), tl.load(meta_ptr + 1)
    rows = tl.arange(0, R)
    valid = rows < GROUP
    head = kv_head * GROUP + rows
    dims = tl.arange(0, BLOCK_D)
    inside_d = dims < HEAD_DIM
    q = tl.load(
        q_ptr + head[:, None] * HEAD_DIM + dims[None, :],
        mask=valid[:, None] & inside_d[None, :],
        other=0.0,
    )
    columns = tl.arange(0, BLOCK_N)
    k_offsets = columns[None, :] * (NUM_KV * HEAD_DIM) + dims[:, None]
    peak = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    tile_low, tile_high = low // BLOCK_N, tl.cdiv(high, BLOCK_N)
    for tile in range(tile_low + split, tile_high, num_splits):
        row = first_row(page_table_ptr, tile * BLOCK_N, PAGE)
        k_base = keys_ptr + (row * NUM_KV + kv_head) * HEAD_DIM
        if BLOCK_D == HEAD_DIM:
            k = tl.load(k_base + k_offsets, eviction_policy="evict_first")
        else:
            k = tl.load(k_base + k_offsets, mask=inside_d[:, None], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        positions = tile * BLOCK_N + columns
        wanted = (positions >= low) & (positions < high)
        if HAS_ALLOWED:
            before = tl.load(allowed_ptr + positions, mask=wanted, other=0)
            wanted = wanted & (tl.load(allowed_ptr + positions + 1, mask=wanted, other=0) > before)
        scores = tl.where(wanted[None, :], scores, float("-inf"))
        tl.store(
            logits_ptr + head[:, None].to(tl.int64) * stride + positions[None, :],
            scores,
            mask=valid[:, None],
            eviction_policy="evict_last",
        )
        peak, total = add_exp2(scores, peak, total)
    tl.store(max_ptr + head * num_splits + split, peak, mask=valid)
    tl.store(sum_ptr + head * num_splits + split, total, mask=valid)
    if arrives_last(tickets_ptr + kv_head, num_splits):
        lse = log_sums(max_ptr, sum_ptr, head, valid, num_splits, SPLITS)
        tl.store(lse_ptr + head, lse, mask=valid)


@triton.jit(do_not_specialize=["num_tiles"])
def _decode_votes_kernel(
    logits_ptr,  # [num_heads, stride] float32
    lse_ptr,  # [num_heads] float32
    votes_ptr,  # [num_sets, 1, stride] float32
    maxima_ptr,  # [num_sets, num_tiles] int32
    floors_ptr,  # [num_sets] int32
    tickets_ptr,  # [num_sets] int32
    meta_ptr,  # [1, 4] int32: init_end, local_start, num_selected, num_before
    skip_ptr,  # int32
    stride,
    num_tiles,
    HEADS: tl.constexpr,  # heads per set
    SOFT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    low, high = tl.load(meta_ptr), tl.load(meta_ptr + 1)
    chosen_set = tl.program_id(1)
    number = tl.arange(0, BLOCK_HEADS)
    heads = chosen_set * HEADS + number
    # From the end: see above.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK
    if first < high:
        positions = first + tl.arange(0, BLOCK)
        inside = (positions >= low) & (positions < high)
        mask = (number < HEADS)[:, None] & inside[None, :]
        source = heads[:, None].to(tl.int64) * stride + positions[None, :]
        logits = tl.load(
            logits_ptr + source, mask=mask, other=float("-inf"), eviction_policy="evict_first"
        )
        forbidden = tl.max(logits, 0) == float("-inf")
        if SOFT:
            lse = tl.load(lse_ptr + heads, mask=number < HEADS, other=0.0)
            votes = tl.sum(tl.exp2(logits - lse[:, None]), 0)
        else:
            votes = tl.sum(tl.where(mask, logits, 0.0), 0)
        votes = tl.where(forbidden, float("-inf"), votes)
        tl.store(votes_ptr + chosen_set.to(tl.int64) * stride + positions, votes, mask=inside)
        store_maxima(votes, inside, maxima_ptr, chosen_set, first, num_tiles, BLOCK, TILE)
    if arrives_last(tickets_ptr + chosen_set, tl.num_programs(0)):
        k = tl.load(meta_ptr + 2)
        store_floor(maxima_ptr, floors_ptr, chosen_set, num_tiles, high, k, TILE, SEARCH)


def decode_votes(
    query: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    meta: torch.Tensor,
    skip: torch.Tensor,
    space: TopSpace,
    tickets: torch.Tensor,
    *,
    length: int,
    per_kv_head: bool,
    soft: bool = True,
    allowed: torch.Tensor | None = None,
    num_sms: int = 1,
    tuning: DecodeTuning | None = None,
) -> torch.Tensor:
    """Votes of one query over the candidates that `meta` names, unless `skip` is set.

    Args:
        query: [num_qo_heads, head_dim], scaled (by log2(e) / sqrt(head_dim) where `soft`).
        keys: [num_slots, num_kv_heads, head_dim] pool.
        page_table: [num_pages] int32.
        meta: [1, 4] int32: init_end, local_start, num_selected, num_before.
        skip: [1] int32; when it is not 0, nothing is computed.
        space: Of rows of `length`, one per set; receives maxima and floors of the votes.
        tickets: [num_kv_heads] int32, zeros before and afterwards.
        length: Positions there are room for, a multiple of 256.
        per_kv_head: One set per KV head instead of one.
        soft: Sum of softmax probabilities; False is the sum of scaled scores.
        allowed: [length + 1] int32, running count of positions that may be selected.
        num_sms: Multiprocessors of the device.
        tuning: Tile sizes.

    Returns:
        [num_sets, 1, length] float32 by position, unwritten outside the candidates.
    """
    num_heads, head_dim = query.shape
    num_kv = keys.shape[1]
    group = num_heads // num_kv
    tuning = tuning or DecodeTuning()
    exact = query.dtype == torch.float32
    block_n = 32 if exact else tuning.block
    splits = max(1, tuning.programs * num_sms // num_kv)
    logits = torch.empty(num_heads, length, device=query.device)
    peak = torch.empty(num_heads, splits, device=query.device)
    total = torch.empty_like(peak)
    lse = torch.empty(num_heads, device=query.device)
    _logits_kernel[(num_kv, splits)](
        query, keys, page_table, meta, allowed, logits, peak, total, lse, tickets, skip, length,
        splits, SPLITS=padded(splits), GROUP=group, R=padded(group, 16), NUM_KV=num_kv,
        HEAD_DIM=head_dim, BLOCK_D=padded(head_dim, 16), BLOCK_N=block_n,
        HAS_ALLOWED=allowed is not None, PRECISION=precision(query.dtype), PAGE=PAGE_SIZE,
        num_warps=tuning.warps, num_stages=1 if exact else tuning.stages,
    )  # fmt: skip
    num_sets = num_kv if per_kv_head else 1
    votes = torch.empty(num_sets, 1, length, device=query.device)
    per_set = num_heads // num_sets
    block = min(tuning.votes_block, length)
    _decode_votes_kernel[(triton.cdiv(length, block), num_sets)](
        logits, lse, votes, space.maxima, space.floors, space.tickets[0], meta, skip, length,
        space.maxima.shape[1], HEADS=per_set, SOFT=soft, BLOCK_HEADS=padded(per_set),
        TILE=space.tile, BLOCK=block, SEARCH=2048, num_warps=tuning.votes_warps,
    )  # fmt: skip
    return votes
