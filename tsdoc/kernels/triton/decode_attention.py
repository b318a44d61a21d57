"""Split-K attention of one decode token over a layer's window of gathered rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.triton.attention import attend_tile, load_rotated
from tsdoc.kernels.triton.tiles import LOG2_E, padded, precision


@triton.jit
def _split_kernel(
    q_ptr,  # [num_heads, HEAD_DIM]
    k_ptr,  # [num_kv, num_rows, HEAD_DIM], rotated
    v_ptr,  # same
    length_ptr,  # int32: rows in use; the token itself is the last
    acc_ptr,  # [num_heads, num_splits, HEAD_DIM] float32
    max_ptr,  # [num_heads, num_splits] float32
    sum_ptr,  # same
    cos_ptr,
    sin_ptr,
    scale,
    num_rows,
    num_splits,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head, split = tl.program_id(0), tl.program_id(1)
    length = tl.load(length_ptr)
    rows = tl.arange(0, R)
    valid = rows < GROUP
    head = kv_head * GROUP + rows
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    places = tl.zeros([R], tl.int32) + length - 1
    q = load_rotated(
        q_ptr, head * HEAD_DIM, places, valid, cos_ptr, sin_ptr, scale, HEAD_DIM, BLOCK_D
    ).to(k_ptr.dtype.element_ty)
    peak = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, BLOCK_D], tl.float32)
    share = tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N
    begin = split * share
    plane = kv_head.to(tl.int64) * num_rows * HEAD_DIM
    for at in range(begin, tl.minimum(begin + share, length), BLOCK_N):
        inside = at + columns < length
        source = plane + (at + columns) * HEAD_DIM
        k = tl.load(
            k_ptr + source[None, :] + dims[:, None],
            mask=inside[None, :] & (dims < HEAD_DIM)[:, None],
            other=0.0,
        )
        v = tl.load(
            v_ptr + source[:, None] + dims[None, :],
            mask=inside[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        peak, total, acc = attend_tile(q, k, v, inside[None, :], peak, total, acc, True, PRECISION)
    target = head * num_splits + split
    tl.store(max_ptr + target, peak, mask=valid)
    tl.store(sum_ptr + target, total, mask=valid)
    out_mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(acc_ptr + target[:, None] * HEAD_DIM + dims[None, :], acc, mask=out_mask)


@triton.jit
def _join_kernel(
    acc_ptr,  # [num_heads, num_splits, HEAD_DIM] float32
    max_ptr,  # [num_heads, num_splits] float32
    sum_ptr,  # same
    out_ptr,  # [num_heads, HEAD_DIM]
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    head = tl.program_id(0)
    splits = tl.arange(0, BLOCK_S)
    dims = tl.arange(0, BLOCK_D)
    inside = splits < num_splits
    at = head * num_splits + splits
    peak = tl.load(max_ptr + at, mask=inside, other=float("-inf"))
    total = tl.load(sum_ptr + at, mask=inside, other=0.0)
    weight = tl.exp2(peak - tl.max(peak, 0))
    mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.load(acc_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    out = tl.sum(acc * weight[:, None], 0) / tl.sum(total * weight, 0)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head * HEAD_DIM + dims, out, mask=dims < HEAD_DIM)


def attend_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    length: torch.Tensor,
    rope: RopeTable,
    *,
    num_splits: int = 32,
) -> torch.Tensor:
    """Attention of the token in row `length` - 1 over rows [0, length).

    Args:
        q: [num_qo_heads, head_dim], before RoPE, contiguous.
        k: [num_kv_heads, num_rows, head_dim], rotated.
        v: Same.
        length: [1] int32 on the device.
        rope: Table of compact positions.
        num_splits: Programs per KV head.

    Returns:
        [num_qo_heads, head_dim] in q's type.
    """
    num_heads, head_dim = q.shape
    num_kv, num_rows, _ = k.shape
    group = num_heads // num_kv
    block_n = 32
    num_splits = min(num_splits, triton.cdiv(num_rows, block_n))
    acc = torch.empty(num_heads, num_splits, head_dim, device=q.device)
    peak = torch.empty(num_heads, num_splits, device=q.device)
    total = torch.empty_like(peak)
    _split_kernel[(num_kv, num_splits)](
        q, k, v, length, acc, peak, total, rope.cos, rope.sin, head_dim**-0.5 * LOG2_E,
        num_rows, num_splits, GROUP=group, R=padded(group, 16), HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim, 16), BLOCK_N=block_n, PRECISION=precision(k.dtype),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    out = torch.empty_like(q)
    _join_kernel[(num_heads,)](
        acc, peak, total, out, num_splits, HEAD_DIM=head_dim, BLOCK_D=padded(head_dim),
        BLOCK_S=padded(num_splits), num_warps=4,
    )  # fmt: skip
    return out
