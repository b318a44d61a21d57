"""Products of queries' weights with the codes of the key index, on the CPU.

They come out as the bits of softmax terms (see `tsdoc.kernels.index_terms`). Where oneDNN is fast
at bytes, codes stay bytes and weights are rounded to eight bits: sums of products are exact then,
and take a third of the time that widening codes to float32 and multiplying these takes.
"""

from __future__ import annotations

import math
import platform
from functools import cache
from typing import Protocol

import torch

from tsdoc.kernels.index import PAGE, RANK

MANTISSA = 1 << 23
ONE = 127 * MANTISSA  # the bits of 1.0
LINE = math.log2(0.5 / math.log(2) ** 2)  # how much the straight line lies above, on average
REFERENCE = int(ONE - LINE * MANTISSA)  # the bits of the sample's greatest term
GREATEST = 100  # terms are at most 2^100 times the sample's greatest, so that sums are finite
LOW_CODES = 0x0F0F0F0F  # of four bytes
EIGHT_LOW_CODES = LOW_CODES << 32 | LOW_CODES
GREATEST_WEIGHT = 127
GREATEST_FACTOR = 1 << 30  # one more in a sum of products is then 2^128 times the term


class Scratch:
    """What one core unpacks codes into."""

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of any content; what was taken under that name before is overwritten."""
        memory = self._memory.get(name)
        if memory is None or memory.shape != shape:
            memory = self._memory[name] = torch.empty(shape, dtype=dtype)
        return memory


class Products(Protocol):
    """Weights of some rows (a query's head each), ready to be multiplied with codes.

    Attributes:
        weights: [num_kv_heads, rows, RANK] float32, as they are multiplied.
    """

    weights: torch.Tensor

    def num_pages(self, total: int, num_threads: int) -> int:
        """How many of `total` pages are worked on at a time."""

    def refer_to(self, sample: torch.Tensor) -> torch.Tensor:
        """Makes 1 the greatest term among some keys, on average.

        Args:
            sample: Their codes, [num_kv_heads, n, RANK].

        Returns:
            Their greatest products, [num_kv_heads, rows]; 0 without keys.
        """

    def fill(self, scratch: Scratch, packed: torch.Tensor, bits: torch.Tensor) -> None:
        """Computes MANTISSA · (products - greatest of the sample) + REFERENCE, within bounds.

        Args:
            scratch: Of this core.
            packed: [num_kv_heads, keys / 2, RANK] uint8 of whole pages; low codes come before all
                high ones.
            bits: [num_kv_heads, rows, keys] int32, receives them, rounded.
        """


class FloatProducts:
    """See `Products`: by float32."""

    _TILE_PAGES = 64
    _TILE_BYTES = 1 << 20  # of terms

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights
        self._scaled = weights * MANTISSA
        self._bias = torch.empty(0)

    def num_pages(self, total: int, num_threads: int) -> int:
        """See `Products.num_pages`."""
        num_rows = self.weights.shape[:2].numel()
        return max(1, min(self._TILE_PAGES, self._TILE_BYTES // (4 * PAGE * num_rows)))

    def refer_to(self, sample: torch.Tensor) -> torch.Tensor:
        """See `Products.refer_to`."""
        peaks = _greatest(self.weights, sample)
        self._bias = (REFERENCE - MANTISSA * peaks).unsqueeze(-1)
        return peaks

    def fill(self, scratch: Scratch, packed: torch.Tensor, bits: torch.Tensor) -> None:
        """See `Products.fill`."""
        num_kv, lines, _ = packed.shape
        halves = scratch.take("halves", (num_kv, 2, lines, RANK // 4), torch.int32)
        codes = scratch.take("codes", (num_kv, 2, lines, RANK), torch.float32)
        out = scratch.take("out", tuple(bits.shape), torch.float32)
        words = packed.view(torch.int32)  # four codes at a time
        low, high = halves.unbind(1)
        torch.bitwise_and(words, LOW_CODES, out=low)
        torch.bitwise_right_shift(words, 4, out=high)
        high.bitwise_and_(LOW_CODES)
        codes.copy_(halves.view(torch.uint8))
        torch.baddbmm(self._bias, self._scaled, codes.flatten(1, 2).mT, out=out)
        bits.copy_(out.clamp_(0, ONE + GREATEST * MANTISSA))


class ByteProducts:
    """See `Products`: by bytes.

    A row's sum of products is multiplied by an integer and added to another, modulo 2^32: what
    comes out is within bounds, since the sum is bounded before.
    """

    _TILE_PAGES = 512
    _TILE_BYTES = 8 << 20  # of terms: larger than a cache, but every product has a price of its own

    def __init__(self, weights: torch.Tensor) -> None:
        factors = (weights.abs().amax(dim=-1) * (MANTISSA / GREATEST_WEIGHT)).ceil_().clamp_min_(1)
        scales = (factors / MANTISSA).unsqueeze(-1)
        self._rounded = (weights / scales).round_()
        self._bytes = self._rounded.to(torch.int8)
        self.weights = self._rounded * scales
        self._factors = [
            [min(int(factor), GREATEST_FACTOR) for factor in head] for head in factors.tolist()
        ]
        self._scales = scales.squeeze(-1)
        self._peaks: list[list[int]] = []
        self._summands = torch.empty(0)

    def num_pages(self, total: int, num_threads: int) -> int:
        """See `Products.num_pages`."""
        num_rows = self.weights.shape[:2].numel()
        most = min(self._TILE_PAGES, self._TILE_BYTES // (4 * PAGE * num_rows))
        return max(1, min(most, -(-total // num_threads)))

    def refer_to(self, sample: torch.Tensor) -> torch.Tensor:
        """See `Products.refer_to`."""
        peaks = _greatest(self._rounded, sample)  # exact: they are integers
        self._peaks = peaks.int().tolist()
        self._summands = torch.tensor(
            [
                [_wrapped(REFERENCE - factor * peak) for factor, peak in zip(*head, strict=True)]
                for head in zip(self._factors, self._peaks, strict=True)
            ],
            dtype=torch.int32,
        )
        return peaks * self._scales

    def fill(self, scratch: Scratch, packed: torch.Tensor, bits: torch.Tensor) -> None:
        """See `Products.fill`."""
        codes = scratch.take("bytes", (2, packed.shape[1], RANK), torch.uint8)
        for own, weights, out, factors, peaks, summands in zip(
            packed, self._bytes, bits, self._factors, self._peaks, self._summands, strict=True
        ):
            torch.bitwise_and(
                own.view(torch.int64), EIGHT_LOW_CODES, out=codes[0].view(torch.int64)
            )
            torch.bitwise_right_shift(own, 4, out=codes[1])
            _multiply(weights, codes.view(torch.int8).flatten(0, 1), out)
            for row, factor, peak, summand in zip(out, factors, peaks, summands, strict=True):
                row.clamp_(peak - REFERENCE // factor, peak + GREATEST * MANTISSA // factor)
                torch.add(summand, row, alpha=factor, out=row)


def _greatest(weights: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Greatest products of rows [num_kv_heads, rows, RANK] and codes; 0 without codes."""
    if not sample.shape[1]:
        return torch.zeros(weights.shape[:2])
    return torch.bmm(weights, sample.float().mT).amax(dim=-1)


def _wrapped(number: int) -> int:
    """What is equal modulo 2^32 and an int32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _multiply(weights: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
    """Puts `weights` [rows, RANK] times `codes` [keys, RANK], int8, into `out` [rows, keys]."""
    torch._int_mm(weights, codes.mT, out=out)


@cache
def multiplies_bytes() -> bool:
    """Whether `ByteProducts` is known to be fast here, and does what it is to do."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch._C._has_mkldnn:
        return False
    weights = torch.arange(-GREATEST_WEIGHT, GREATEST_WEIGHT + 1, 2)[: 3 * RANK].view(3, RANK)
    weights[0], weights[2, ::3] = -GREATEST_WEIGHT, GREATEST_WEIGHT
    codes = torch.arange(PAGE * RANK).view(PAGE, RANK) * 7 % 16
    codes[-1] = 15
    found = torch.empty(3, PAGE, dtype=torch.int32)
    try:
        _multiply(weights.to(torch.int8), codes.to(torch.int8), found)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(found.long(), weights @ codes.mT)
