"""Matrix products on the CPU, by the library that suits its processor.

Torch brings Intel's MKL, which on AMD's processors reaches two thirds to three quarters of what
numpy's OpenBLAS does there in float32. OpenBLAS then runs on one thread per product, and the rows
of a large one are shared out among `Workers`: a pool of its own would wait beside torch's.
"""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from tsdoc.kernels.workers import Workers

SMALLEST = 1 << 15  # numbers in a weight matrix: smaller ones gain nothing
SLICE_ROWS = 512  # of one thread at a time
ROW_UNIT = 12  # OpenBLAS's AVX2 kernels take that many together, and sum a rest in another order


class Products:
    """`x` times a weight matrix, and a bias.

    A row's result depends on its place among SLICE_ROWS, but not on the rows beside it (a rest is
    filled up to ROW_UNIT): K and V are the same for all sizes of blocks, which are multiples of it.

    Args:
        workers: Share out the work.
        openblas: Whether float32 products of matrices are numpy's; None decides by the processor.
    """

    def __init__(self, workers: Workers, *, openblas: bool | None = None) -> None:
        self._workers = workers
        self._openblas = prefers_openblas() if openblas is None else openblas
        if self._openblas:
            _one_thread_each()

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` [num_rows, k] times `weight` [n, k] transposed, plus `bias` [n]: [num_rows, n]."""
        worth = x.shape[0] > 1 and x.dtype == torch.float32 and weight.numel() >= SMALLEST
        if not self._openblas or not worth:
            return F.linear(x, weight, bias)
        out = torch.empty(x.shape[0], weight.shape[0])
        parts = self._workers.split(x.shape[0], SLICE_ROWS, ROW_UNIT)
        self._workers.run([partial(_product, x[p], weight, bias, out[p]) for p in parts])
        return out


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    rest = -x.shape[0] % ROW_UNIT
    if rest == 0:
        np.matmul(x.numpy(), weight.numpy().T, out=out.numpy())
    else:
        filled = np.matmul(F.pad(x, (0, 0, 0, rest)).numpy(), weight.numpy().T)
        out.copy_(torch.from_numpy(filled)[: x.shape[0]])
    if bias is not None:
        out += bias


def prefers_openblas() -> bool:
    """Whether the processor is AMD's, torch has MKL, and numpy has OpenBLAS."""
    if not torch._C.has_mkl or "AuthenticAMD" not in _processor():
        return False
    from threadpoolctl import ThreadpoolController

    return bool(ThreadpoolController().select(internal_api="openblas").lib_controllers)


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            return next((line for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return platform.processor()


def _one_thread_each() -> None:
    from threadpoolctl import ThreadpoolController

    ThreadpoolController().select(internal_api="openblas").limit(limits=1)
