"""The decoder's element-wise work in one pass each: RMS norm and the gated activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.tiles import padded


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [num_rows, SIZE], rows x_stride apart
    weight_ptr,  # [SIZE]
    out_ptr,  # [num_rows, SIZE]
    eps,
    x_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0)
    tl.store(out_ptr + row * SIZE + columns, (wide * scale).to(x.dtype) * weight, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of rows: see `tsdoc.engine.decoder.rms_norm`.

    Args:
        x: [num_rows, size], the last dimension contiguous.
        weight: [size].
        eps: Added to the mean square.

    Returns:
        [num_rows, size] in x's type, contiguous.
    """
    num_rows, size = x.shape
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    block = padded(size)
    _rms_norm_kernel[(num_rows,)](
        x, weight, out, eps, x.stride(0), SIZE=size, BLOCK=block, num_warps=8 if block > 2048 else 4
    )
    return out


@triton.jit
def _silu_mul_kernel(
    x_ptr,  # [num_rows, 2 * size]: gate, up
    out_ptr,  # [num_rows, size]
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    x = tl.load(x_ptr + row * 2 * size + columns, mask=mask, other=0.0)
    gate = x.to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + columns, mask=mask, other=0.0)
    active = (gate / (1.0 + tl.exp(-gate))).to(x.dtype)
    tl.store(out_ptr + row * size + columns, active * up, mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of `gate_up` [num_rows, 2 · size], contiguous: [num_rows, size]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    block = min(padded(size), 2048)
    _silu_mul_kernel[(num_rows, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block)
    return out


def reference_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
