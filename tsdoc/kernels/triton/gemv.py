"""Products of one row with a weight matrix, as decode needs them: bound by reading the weights.

What comes before and after each product is done in the same launch: RMS norm of the input, bias,
gated activation of two products, addition to the residual. Values are rounded where the separate
operations would round them, except that a residual is added before rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.tiles import padded


@triton.jit
def _norm_scale(x_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """1 / RMS of x [SIZE]."""
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)


@triton.jit
def _load_input(
    x_ptr, norm_ptr, columns, scale, SIZE: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr
):
    """A slice of the input, normed where wanted, float32."""
    if EVEN:
        x = tl.load(x_ptr + columns)
    else:
        x = tl.load(x_ptr + columns, mask=columns < SIZE, other=0.0)
    if NORM:
        if EVEN:
            weight = tl.load(norm_ptr + columns)
        else:
            weight = tl.load(norm_ptr + columns, mask=columns < SIZE, other=0.0)
        x = (x.to(tl.float32) * scale).to(x.dtype) * weight
    return x.to(tl.float32)


@triton.jit
def _load_weight(w_ptr, rows, columns, num_rows, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """[rows, columns] of the weight; the rows are clamped, what they give is not stored."""
    at = tl.minimum(rows, num_rows - 1)[:, None].to(tl.int64) * SIZE + columns[None, :]
    if EVEN:
        return tl.load(w_ptr + at, eviction_policy="evict_first")
    return tl.load(
        w_ptr + at, mask=(columns < SIZE)[None, :], other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def _row_kernel(
    x_ptr,  # [SIZE]
    w_ptr,  # [num_rows, SIZE]
    norm_ptr,  # [SIZE] weight of the RMS norm of x, where NORM
    bias_ptr,  # [num_rows], where BIAS
    out_ptr,  # [num_rows]; where ADD it is added to
    eps,
    num_rows,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,  # w is [2 * num_rows, SIZE], gate then up; out is silu(gate) * up
    EVEN: tl.constexpr,  # BLOCK_K divides SIZE
    BLOCK_X: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    scale = 1.0
    if NORM:
        scale = _norm_scale(x_ptr, eps, SIZE, BLOCK_X)
    first = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    second = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    w_up_ptr = w_ptr
    if GATED:
        w_up_ptr = w_ptr + (tl.zeros([], tl.int64) + num_rows) * SIZE
    for start in range(0, SIZE, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        x = _load_input(x_ptr, norm_ptr, columns, scale, SIZE, EVEN, NORM)[None, :]
        w = _load_weight(w_ptr, rows, columns, num_rows, SIZE, EVEN)
        first += w.to(tl.float32) * x
        if GATED:
            w = _load_weight(w_up_ptr, rows, columns, num_rows, SIZE, EVEN)
            second += w.to(tl.float32) * x
    inside = rows < num_rows
    out = tl.sum(first, 1)
    dtype = out_ptr.dtype.element_ty
    if BIAS:
        out += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(second, 1)
        if BIAS:
            up += tl.load(bias_ptr + num_rows + rows, mask=inside, other=0.0).to(tl.float32)
        gate = out.to(dtype).to(tl.float32)
        active = (gate / (1.0 + tl.exp(-gate))).to(dtype)
        out = (active * up.to(dtype)).to(tl.float32)
    if ADD:
        out += tl.load(out_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, out.to(dtype), mask=inside)


def multiply_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    out: torch.Tensor | None = None,
    add: bool = False,
    gated: bool = False,
    block_n: int = 4,
    block_k: int = 512,
    num_warps: int = 4,
) -> torch.Tensor:
    """One row times a weight: weight · x, with what surrounds it.

    Args:
        x: [1, size], contiguous.
        weight: [num_rows, size], or gate and up stacked, [2 · num_rows, size].
        bias: [num_rows] or [2 · num_rows].
        norm: [size], weight of an RMS norm of x that comes first.
        eps: Of that norm.
        out: [1, num_rows], where the result goes; new without one.
        add: The result is added to what `out` holds.
        gated: silu(gate) · up of the two products.
        block_n: Rows per program.
        block_k: Columns at a time.
        num_warps: Warps per program.

    Returns:
        [1, num_rows] in x's type.
    """
    size = x.shape[1]
    num_rows = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty(1, num_rows, dtype=x.dtype, device=x.device)
    block_k = min(block_k, padded(size, 16))
    _row_kernel[(triton.cdiv(num_rows, block_n),)](
        x, weight, norm, bias, out, eps, num_rows, SIZE=size, NORM=norm is not None,
        BIAS=bias is not None, ADD=add, GATED=gated, EVEN=size % block_k == 0,
        BLOCK_X=padded(size), BLOCK_N=block_n, BLOCK_K=block_k, num_warps=num_warps, num_stages=2,
    )  # fmt: skip
    return out
