"""Votes of one decode query: one pass over K, which is memory-bound, then one over the scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.score_stats import combine_stats
from tsdoc.kernels.triton.tiles import PAGE_SIZE, add_exp2, first_row, padded, precision
from tsdoc.kernels.triton.topk import Maxima, empty_maxima, store_maxima


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuning:
    """Tile sizes; any choice gives the same votes up to rounding.

    Attributes:
        block: Keys per tile.
        programs: Programs per multiprocessor.
        votes_block: Positions whose votes one program adds up.
    """

    block: int = 64
    warps: int = 4
    stages: int = 6
    programs: int = 4
    votes_block: int = 256


@triton.jit
def _logits_kernel(
    q_ptr,  # [num_heads, HEAD_DIM], scaled
    keys_ptr,  # [num_slots, NUM_KV, HEAD_DIM]
    page_table_ptr,  # [num_pages] int32
    meta_ptr,  # [1, 4] int32: init_end, local_start, num_selected, num_before
    allowed_ptr,  # [positions + 1] int32, running count of allowed positions
    logits_ptr,  # [num_heads, stride] float32
    max_ptr,  # [num_heads, num_splits] float32
    sum_ptr,  # same
    skip_ptr,  # int32
    stride,
    num_splits,
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
    share = tl.cdiv(tile_high - tile_low, num_splits)
    begin = tile_low + split * share
    for tile in range(begin, tl.minimum(begin + share, tile_high)):
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
        )
        peak, total = add_exp2(scores, peak, total)
    tl.store(max_ptr + head * num_splits + split, peak, mask=valid)
    tl.store(sum_ptr + head * num_splits + split, total, mask=valid)


@triton.jit
def _decode_votes_kernel(
    logits_ptr,  # [num_heads, stride] float32
    lse_ptr,  # [num_heads] float32
    votes_ptr,  # [num_sets, 1, stride] float32
    fine_ptr,  # [num_sets, stride / 8] float32 maxima
    coarse_ptr,  # [num_sets, stride / 64] float32 maxima
    meta_ptr,  # [1, 4] int32: init_end, local_start, num_selected, num_before
    skip_ptr,  # int32
    stride,
    HEADS: tl.constexpr,  # heads per set
    SOFT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    # From the end, where the scores have been written last and may still be in the L2 cache.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK
    low, high = tl.load(meta_ptr), tl.load(meta_ptr + 1)
    if first >= high:
        return
    chosen_set = tl.program_id(1)
    number = tl.arange(0, BLOCK_HEADS)
    heads = chosen_set * HEADS + number
    positions = first + tl.arange(0, BLOCK)
    inside = (positions >= low) & (positions < high)
    mask = (number < HEADS)[:, None] & inside[None, :]
    source = heads[:, None].to(tl.int64) * stride + positions[None, :]
    logits = tl.load(logits_ptr + source, mask=mask, other=float("-inf"))
    forbidden = tl.max(logits, 0) == float("-inf")
    if SOFT:
        lse = tl.load(lse_ptr + heads, mask=number < HEADS, other=0.0)
        votes = tl.sum(tl.exp2(logits - lse[:, None]), 0)
    else:
        votes = tl.sum(tl.where(mask, logits, 0.0), 0)
    votes = tl.where(forbidden, float("-inf"), votes)
    tl.store(votes_ptr + chosen_set.to(tl.int64) * stride + positions, votes, mask=inside)
    store_maxima(votes, fine_ptr, coarse_ptr, chosen_set, first, stride, BLOCK)


def decode_votes(
    query: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    meta: torch.Tensor,
    skip: torch.Tensor,
    *,
    length: int,
    per_kv_head: bool,
    soft: bool = True,
    allowed: torch.Tensor | None = None,
    num_sms: int = 1,
    tuning: DecodeTuning | None = None,
) -> tuple[torch.Tensor, Maxima]:
    """Votes of one query over the candidates that `meta` names, unless `skip` is set.

    Args:
        query: [num_qo_heads, head_dim], scaled (by log2(e) / sqrt(head_dim) where `soft`).
        keys: [num_slots, num_kv_heads, head_dim] pool.
        page_table: [num_pages] int32.
        meta: [1, 4] int32: init_end, local_start, num_selected, num_before.
        skip: [1] int32; when it is not 0, nothing is computed.
        length: Positions there are room for, a multiple of 256.
        per_kv_head: One set per KV head instead of one.
        soft: Sum of softmax probabilities; False is the sum of scaled scores.
        allowed: [length + 1] int32, running count of positions that may be selected.
        num_sms: Multiprocessors of the device.
        tuning: Tile sizes.

    Returns:
        [num_sets, 1, length] float32 by position, unwritten outside the candidates, and their
        maxima.
    """
    num_heads, head_dim = query.shape
    num_kv = keys.shape[1]
    group = num_heads // num_kv
    tuning = tuning or DecodeTuning()
    exact = query.dtype == torch.float32
    block_n = 32 if exact else tuning.block
    splits = max(1, min(length // block_n, tuning.programs * num_sms // num_kv))
    logits = torch.empty(num_heads, length, device=query.device)
    peak = torch.empty(num_heads, splits, device=query.device)
    total = torch.empty_like(peak)
    _logits_kernel[(num_kv, splits)](
        query, keys, page_table, meta, allowed, logits, peak, total, skip, length, splits,
        GROUP=group, R=padded(group, 16), NUM_KV=num_kv, HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim, 16), BLOCK_N=block_n, HAS_ALLOWED=allowed is not None,
        PRECISION=precision(query.dtype), PAGE=PAGE_SIZE, num_warps=tuning.warps,
        num_stages=1 if exact else tuning.stages,
    )  # fmt: skip
    lse = combine_stats(peak, total, skip)
    num_sets = num_kv if per_kv_head else 1
    votes = torch.empty(num_sets, 1, length, device=query.device)
    per_set = num_heads // num_sets
    maxima = empty_maxima(num_sets, length, query.device)
    _decode_votes_kernel[(triton.cdiv(length, tuning.votes_block), num_sets)](
        logits, lse, votes, maxima.fine, maxima.coarse, meta, skip, length, HEADS=per_set,
        SOFT=soft, BLOCK_HEADS=padded(per_set), BLOCK=tuning.votes_block, num_warps=4,
    )  # fmt: skip
    return votes, maxima
