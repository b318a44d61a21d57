"""Attention of a block's chunks over their gathered rows (reference: `reference_attention`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.triton.tiles import LOG2_E, padded, precision


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTuning:
    """Tile sizes; any choice gives the same result up to rounding."""

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3


@triton.jit
def load_rotated(
    q_ptr,
    offsets,  # [n] int64: first element of each row
    places,  # [n]: compact positions
    inside,  # [n]
    cos_ptr,
    sin_ptr,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Queries [n, BLOCK_D] rotated to `places`, times `scale`, float32."""
    dims = tl.arange(0, BLOCK_D)
    HALF: tl.constexpr = HEAD_DIM // 2
    mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
    partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
    sign = tl.where(dims < HALF, -1.0, 1.0)
    own = tl.load(q_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    other = tl.load(q_ptr + offsets[:, None] + partner[None, :], mask=mask, other=0.0)
    table = places[:, None] * HEAD_DIM + dims[None, :]
    cos = tl.load(cos_ptr + table, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + table, mask=mask, other=0.0)
    turned = other.to(tl.float32) * sin * sign[None, :]
    return (own.to(tl.float32) * cos + turned) * scale


@triton.jit
def _rotate_kernel(
    q_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM], tokens q_stride apart
    out_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    meta_ptr,  # [num_chunks, 4] int32: init_end, local_start, num_selected, num_before
    bounds_ptr,  # [num_chunks, 2] int32: first token and number of tokens, within q
    cos_ptr,  # [num_positions, HEAD_DIM] float32
    sin_ptr,  # same
    q_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token, chunk = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(bounds_ptr + 2 * chunk + 1):
        return
    row = (tl.load(bounds_ptr + 2 * chunk) + token).to(tl.int64)
    place = tl.load(meta_ptr + 4 * chunk + 3) + token
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, BLOCK_H)
    heads = tl.arange(0, BLOCK_Q)
    mask = (heads < NUM_HEADS)[:, None] & (dims < HALF)[None, :]
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    a = tl.load(q_ptr + row * q_stride + at, mask=mask).to(tl.float32)
    b = tl.load(q_ptr + row * q_stride + at + HALF, mask=mask).to(tl.float32)
    cos = tl.load(cos_ptr + place * HEAD_DIM + dims, mask=dims < HALF)[None, :]
    sin = tl.load(sin_ptr + place * HEAD_DIM + dims, mask=dims < HALF)[None, :]
    out = out_ptr + row * (NUM_HEADS * HEAD_DIM) + at
    tl.store(out, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + HALF, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def attend_tile(
    q, k, v, mask, peak, total, acc, MASKED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One step of the running softmax; k is [BLOCK_D, n], v [n, BLOCK_D]."""
    scores = tl.dot(q, k, input_precision=PRECISION)
    if MASKED:
        scores = tl.where(mask, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    safe = new_peak
    if MASKED:
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(scores - safe[:, None])
    decay = tl.exp2(peak - safe)
    total = total * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return new_peak, total, acc


@triton.jit(do_not_specialize=["num_rows", "num_heads", "lse_tokens"])
def _attention_kernel(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM], tokens q_stride apart
    k_ptr,  # [num_chunks, num_kv, num_rows, HEAD_DIM]
    v_ptr,  # same
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    meta_ptr,  # [num_chunks, 4] int32: init_end, local_start, num_selected, num_before
    bounds_ptr,  # [num_chunks, 2] int32: first token and number of tokens, within q
    cos_ptr,  # [num_positions, HEAD_DIM] float32
    sin_ptr,  # same
    before_ptr,  # [num_chunks, num_heads, tokens, HEAD_DIM] attention over the rows before
    lse_ptr,  # [num_chunks, num_heads, tokens] float32, its log-sum-exp
    scale,
    q_stride,
    num_rows,
    num_heads,
    before_chunk,
    before_head,
    before_token,
    lse_tokens,
    OWN: tl.constexpr,  # q is rotated and the rows before are done: only the chunk's own square
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head, chunk = tl.program_id(1), tl.program_id(2)
    first = tl.load(bounds_ptr + 2 * chunk)
    count = tl.load(bounds_ptr + 2 * chunk + 1)
    start_m = tl.program_id(0) * BLOCK_M
    if start_m >= count:
        return
    num_before = tl.load(meta_ptr + 4 * chunk + 3)
    num_kv = num_heads // GROUP
    rows = start_m + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    offsets = (first + rows).to(tl.int64) * q_stride + head * HEAD_DIM
    inside_q = (rows < count)[:, None] & (dims < HEAD_DIM)[None, :]
    if OWN:
        q = tl.load(q_ptr + offsets[:, None] + dims[None, :], mask=inside_q, other=0.0)
        q = (q.to(tl.float32) * scale).to(k_ptr.dtype.element_ty)
    else:
        q = load_rotated(
            q_ptr, offsets, num_before + rows, rows < count, cos_ptr, sin_ptr, scale,
            HEAD_DIM, BLOCK_D,
        ).to(k_ptr.dtype.element_ty)  # fmt: skip
    plane = (chunk * num_kv + head // GROUP).to(tl.int64) * num_rows * HEAD_DIM
    if OWN:
        source = chunk.to(tl.int64) * before_chunk + head * before_head + rows * before_token
        acc = tl.load(before_ptr + source[:, None] + dims[None, :], mask=inside_q, other=0.0)
        acc = acc.to(tl.float32)
        at_lse = (chunk * num_heads + head) * lse_tokens + rows
        peak = tl.load(lse_ptr + at_lse, mask=rows < count, other=0.0) * 1.4426950408889634
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    # Every row of this tile sees the keys up to its first row's.
    begin = num_before if OWN else 0
    whole = begin + (num_before + start_m + 1 - begin) // BLOCK_N * BLOCK_N
    columns = tl.arange(0, BLOCK_N)
    k_tile = k_ptr + plane + columns[None, :] * HEAD_DIM + dims[:, None]
    v_tile = v_ptr + plane + columns[:, None] * HEAD_DIM + dims[None, :]
    for at in range(begin, whole, BLOCK_N):
        if BLOCK_D == HEAD_DIM:
            k = tl.load(k_tile + at * HEAD_DIM)
            v = tl.load(v_tile + at * HEAD_DIM)
        else:
            k = tl.load(k_tile + at * HEAD_DIM, mask=(dims < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_tile + at * HEAD_DIM, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        peak, total, acc = attend_tile(q, k, v, None, peak, total, acc, False, PRECISION)
    # From here on the causal border runs through the tiles.
    end = num_before + min(start_m + BLOCK_M, count)
    for at in range(whole, end, BLOCK_N):
        at_columns = at + columns
        inside = at_columns < end
        k = tl.load(
            k_tile + at * HEAD_DIM,
            mask=inside[None, :] & (dims < HEAD_DIM)[:, None],
            other=0.0,
        )
        v = tl.load(
            v_tile + at * HEAD_DIM,
            mask=inside[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        mask = at_columns[None, :] <= (num_before + rows)[:, None]
        mask = mask & inside[None, :]
        peak, total, acc = attend_tile(q, k, v, mask, peak, total, acc, True, PRECISION)
    acc = acc / total[:, None]
    target = ((first + rows).to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=inside_q)


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meta: torch.Tensor,
    bounds: torch.Tensor,
    rope: RopeTable,
    *,
    longest: int,
    tuning: AttentionTuning | None = None,
) -> torch.Tensor:
    """Attention of chunks over their rows: all before, and causally their own.

    Args:
        q: [num_tokens, num_qo_heads, head_dim], before RoPE; heads and dimensions contiguous.
        k: [num_chunks, num_kv_heads, num_rows, head_dim], rotated; a chunk's own tokens follow
            its num_before rows.
        v: Same.
        meta: [num_chunks, 4] int32: init_end, local_start, num_selected, num_before.
        bounds: [num_chunks, 2] int32: each chunk's first token and number of tokens, within q.
        rope: Table of compact positions.
        longest: Tokens of the longest chunk.
        tuning: Tile sizes.

    Returns:
        [num_tokens, num_qo_heads, head_dim] in q's type.
    """
    return _launch(q, k, v, meta, bounds, rope, None, longest, tuning or AttentionTuning())


def attend_equal_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meta: torch.Tensor,
    bounds: torch.Tensor,
    rope: RopeTable,
    *,
    num_before: int,
    chunk_len: int,
    rotated: torch.Tensor | None = None,
    tuning: AttentionTuning | None = None,
) -> torch.Tensor:
    """`attend_rows` for chunks of one length and one num_before, on CUDA in half precision.

    The rows before need no mask, so cuDNN's attention, the fastest there is for that, takes all
    chunks at once; the kernel here goes on from its result through the chunks' own squares.
    `rotated` are the queries at their compact positions, where they are there already.
    """
    if rotated is None:
        rotated = rotate_queries(q, meta, bounds, rope, longest=chunk_len)
    num_chunks, (num_heads, head_dim) = k.shape[0], q.shape[1:]
    before = torch.ops.aten._scaled_dot_product_cudnn_attention(
        rotated.view(num_chunks, chunk_len, num_heads, head_dim).transpose(1, 2),
        k[:, :, :num_before],
        v[:, :, :num_before],
        None,
        True,
    )
    tuning = tuning or AttentionTuning(block_m=64, block_n=64, num_warps=4, num_stages=2)
    state = (before[0], before[1])
    return _launch(rotated, k, v, meta, bounds, rope, state, chunk_len, tuning)


def rotate_queries(
    q: torch.Tensor, meta: torch.Tensor, bounds: torch.Tensor, rope: RopeTable, *, longest: int
) -> torch.Tensor:
    """Queries of chunks [num_tokens, num_qo_heads, head_dim] rotated to compact positions."""
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    _rotate_kernel[(longest, bounds.shape[0])](
        q, out, meta, bounds, rope.cos, rope.sin, q.stride(0), NUM_HEADS=num_heads,
        HEAD_DIM=head_dim, BLOCK_Q=padded(num_heads), BLOCK_H=padded(head_dim // 2), num_warps=4,
    )  # fmt: skip
    return out


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    meta: torch.Tensor,
    bounds: torch.Tensor,
    rope: RopeTable,
    before: tuple[torch.Tensor, torch.Tensor] | None,
    longest: int,
    tuning: AttentionTuning,
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_chunks, num_kv, num_rows, _ = k.shape
    exact = k.dtype == torch.float32
    # Two sizes, so that questions of different lengths share kernels.
    block_m = 16 if longest <= 16 else min(tuning.block_m, 32 if exact else 128)
    block_n = min(tuning.block_n, 64 if head_dim > 128 else 128, 32 if exact else 128)
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    done, lse = before if before is not None else (None, None)
    strides = done.stride()[:3] if done is not None else (0, 0, 0)
    _attention_kernel[(triton.cdiv(longest, block_m), num_heads, num_chunks)](
        q, k, v, out, meta, bounds, rope.cos, rope.sin, done, lse, head_dim**-0.5 * LOG2_E,
        q.stride(0), num_rows, num_heads, *strides, longest, OWN=done is not None,
        GROUP=num_heads // num_kv, HEAD_DIM=head_dim, BLOCK_D=padded(head_dim, 16),
        BLOCK_M=block_m, BLOCK_N=block_n, PRECISION=precision(k.dtype),
        num_warps=tuning.num_warps if block_m == 128 else 4,
        num_stages=1 if exact else tuning.num_stages,
    )  # fmt: skip
    return out
