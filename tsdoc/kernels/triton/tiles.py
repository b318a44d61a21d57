"""Small pieces shared by the kernels: paging, tile sizes, types of matrix products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PAGE_SIZE = 256  # tokens per KV page; every tile of keys divides it
LOG2_E = 1.4426950408889634  # softmax is computed in base 2


@triton.jit
def first_row(page_table_ptr, position, PAGE: tl.constexpr):
    """Pool row of `position` (int64), through the page table."""
    page = tl.load(page_table_ptr + position // PAGE).to(tl.int64)
    return page * PAGE + position % PAGE


@triton.jit
def masked_rows(page_table_ptr, positions, mask, PAGE: tl.constexpr):
    """Pool rows of several positions (int64); masked-out ones give row 0 of page 0."""
    pages = tl.load(page_table_ptr + positions // PAGE, mask=mask, other=0).to(tl.int64)
    return pages * PAGE + positions % PAGE


@triton.jit
def add_exp2(scores, peak, total):
    """Adds 2^scores [R, n] to sums `total` [R] relative to their running maxima `peak` [R].

    Rows without a finite score so far stay at -inf and 0.
    """
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    total = total * tl.exp2(peak - safe) + tl.sum(tl.exp2(scores - safe[:, None]), 1)
    return new_peak, total


def padded(size: int, least: int = 1) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << (size - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """`input_precision` of tl.dot: float32 operands are multiplied as float32, never as tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"
