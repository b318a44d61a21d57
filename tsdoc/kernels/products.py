"""Matrix products on the CPU, by the library and in the type that suit its processor.

Torch brings Intel's MKL, which on AMD's processors reaches two thirds to three quarters of what
numpy's OpenBLAS does there in float32. OpenBLAS runs on the thread that calls it: a pool of its own
would wait beside torch's. Processors with tiles for bfloat16 multiply it several times as fast.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from tsdoc.kernels.devices import processor_line
from tsdoc.kernels.workers import Workers

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Compute = Callable[[Linear, torch.Tensor], torch.Tensor]

SMALLEST = 1 << 15  # numbers in a weight matrix: smaller ones gain nothing
SLICE_ROWS = 512  # of one thread at a time
LEAST_ROWS = 48  # below that, reading the weights takes longest
ROW_UNIT = 12  # OpenBLAS's AVX2 kernels take that many together, and sum a rest in another order
NARROW_ROWS = 256  # of a slice in bfloat16: fewer are multiplied more slowly


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
        with self._workers.leading():
            return torch.cat(self._workers.run(self._slices(compute, x)))

    def _slices(self, compute: Compute, x: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
        """`compute` of slices of `x`, one after another."""
        parts = self._workers.split(x.shape[0], SLICE_ROWS, ROW_UNIT)
        return [partial(_filled_up, compute, self.multiply, x[part]) for part in parts]

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


class HalfProducts(Products):
    """Products of rows and weights in bfloat16.

    oneDNN sums in an order that depends on how many rows and threads there are: slices of
    NARROW_ROWS are never cut, so that a row of a whole one does not depend on the block around it
    where that has a slice for each thread. A rest is shared out.
    """

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers, openblas=False)

    def _slices(self, compute: Compute, x: torch.Tensor) -> list[Callable[[], torch.Tensor]]:
        whole = x.shape[0] - x.shape[0] % NARROW_ROWS
        rest = self._workers.split(x.shape[0] - whole, NARROW_ROWS, ROW_UNIT)
        parts = [slice(at, at + NARROW_ROWS) for at in range(0, whole, NARROW_ROWS)]
        parts += [slice(whole + part.start, whole + part.stop) for part in rest]
        return [partial(compute, F.linear, x[part]) for part in parts]


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
    vendor = processor_line("vendor_id") or platform.processor()
    if not torch._C.has_mkl or "AuthenticAMD" not in vendor:
        return False
    from threadpoolctl import ThreadpoolController

    return bool(ThreadpoolController().select(internal_api="openblas").lib_controllers)


def _one_thread_each() -> None:
    from threadpoolctl import ThreadpoolController

    ThreadpoolController().select(internal_api="openblas").limit(limits=1)
