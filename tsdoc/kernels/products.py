"""Matrix products on the CPU, by the library that suits its processor.

Torch brings Intel's MKL, which on AMD's processors reaches two thirds to three quarters of what
numpy's OpenBLAS does there in float32. OpenBLAS runs on the thread that calls it: a pool of its own
would wait beside torch's.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from tsdoc.kernels.workers import Workers

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Compute = Callable[[Linear, torch.Tensor], torch.Tensor]

SMALLEST = 1 << 15  # numbers in a weight matrix: smaller ones gain nothing
SLICE_ROWS = 512  # of one thread at a time
LEAST_ROWS = 48  # below that, reading the weights takes longest
ROW_UNIT = 12  # OpenBLAS's AVX2 kernels take that many together, and sum a rest in another order


class Products:
    """What a decoder does with rows and weight matrices.

    A row's result depends on its place among SLICE_ROWS, but not on the rows beside it (a rest is
    filled up to ROW_UNIT): K and V are the same for all sizes of blocks, which are multiples of it.
    Of fewer rows all of torch's threads share every operation.

    Args:
        workers: Take the slices.
        openblas: Whether float32 products in slices are numpy's; None decides by the processor.
    """

    def __init__(self, workers: Workers, *, openblas: bool | None = None) -> None:
        self._workers = workers
        self._openblas = prefers_openblas() if openblas is None else openblas
        if self._openblas:
            _one_thread_each()

    def by_rows(self, compute: Compute, x: torch.Tensor) -> torch.Tensor:
        """`compute` of all rows of `x`: in slices, each wholly on one thread, if there are many.

        Args:
            compute: Gets what it multiplies by weights with, and rows; returns as many rows.
            x: [num_rows, k].
        """
        if x.shape[0] < LEAST_ROWS:
            return compute(F.linear, x)
        parts = self._workers.split(x.shape[0], SLICE_ROWS, ROW_UNIT)
        tasks = [partial(_filled_up, compute, self.multiply, x[part]) for part in parts]
        with self._workers.leading():
            return torch.cat(self._workers.run(tasks))

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` [num_rows, k] times `weight` [n, k] transposed, plus `bias` [n]: [num_rows, n]."""
        if not self._openblas or x.dtype != torch.float32 or weight.numel() < SMALLEST:
            return F.linear(x, weight, bias)
        out = torch.from_numpy(np.matmul(x.numpy(), weight.numpy().T))
        if bias is not None:
            out += bias
        return out


class NarrowProducts(Products):
    """Products of single rows, by copies of the weights in bfloat16.

    Of one row, reading the weights takes nearly all the time: half the bytes, half the time.
    """

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers, openblas=False)
        self._copies: dict[int, torch.Tensor] = {}

    def by_rows(self, compute: Compute, x: torch.Tensor) -> torch.Tensor:
        """See `Products.by_rows`."""
        return compute(self.multiply, x)

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Products.multiply`; the copy of `weight`, which lives on, is made at first."""
        narrow = self._copies.get(weight.data_ptr())
        if narrow is None:
            narrow = self._copies[weight.data_ptr()] = weight.bfloat16()
        out = F.linear(x.bfloat16(), narrow).to(x.dtype)
        return out if bias is None else out + bias


def _filled_up(compute: Compute, multiply: Linear, x: torch.Tensor) -> torch.Tensor:
    """`compute` of rows that are filled up to ROW_UNIT meanwhile."""
    rest = -x.shape[0] % ROW_UNIT
    return compute(multiply, F.pad(x, (0, 0, 0, rest)) if rest else x)[: x.shape[0]]


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
