"""What queries' softmax terms are by the key index alone, on the CPU: the terms of one piece.

A term is 2^x of an approximate score x, in base 2. It is made without an exponential: the bits of a
float32 are, but for a constant, its logarithm with the fraction between two powers of two taken as
a straight line, so x becomes 2^x by being scaled, rounded and read as a float32. That is at most
6 % off, evenly, where a score is off by a third; the mean is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from tsdoc.kernels.index import HALF, LEVELS, MIDDLE, PAGE, RANK
from tsdoc.kernels.index_products import (
    ByteProducts,
    FloatProducts,
    Products,
    Scratch,
    multiplies_bytes,
)
from tsdoc.kernels.kv import LayerIndex
from tsdoc.kernels.piece_rows import as_tensor
from tsdoc.kernels.workers import Workers

LOG2_E = math.log2(math.e)
PEAK_SAMPLE = 256  # keys among which the greatest score is looked for


class Terms(Protocol):
    """Terms of the softmax of each row (a query's head) over consecutive positions.

    Attributes:
        lse: [num_rows], log2 of their sums.
    """

    lse: torch.Tensor

    def votes(self, shares: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Sums over rows of shares [num_rows] · terms / 2^lse, per position."""

    def mass(self, at: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Sums [num_rows] of terms / 2^lse over positions `at`, ascending, from the first on."""


class Room:
    """Memory for terms and what leads to them, used again: fresh memory costs more than arithmetic.

    Args:
        workers: Take tiles of keys, each with a scratch of its own.
        by_bytes: Whether codes are multiplied as bytes; None decides by the processor.
    """

    def __init__(self, workers: Workers | None = None, *, by_bytes: bool | None = None) -> None:
        self._workers = workers or Workers(1)
        self._by_bytes = multiplies_bytes() if by_bytes is None else by_bytes
        self._scratches = [Scratch() for _ in range(self._workers.num_threads)]
        self._bits = torch.empty(0, dtype=torch.int32)
        self._taken = 0
        self._tensors: dict[int, tuple[LayerIndex, torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        """Gives up what was taken."""
        self._taken = 0

    def take(self, size: int) -> torch.Tensor:
        """[size] int32, of any content."""
        end = self._taken + size
        if end > len(self._bits):  # what was taken before keeps its own memory
            self._bits, self._taken, end = torch.empty(end, dtype=torch.int32), 0, size
        taken = self._bits[self._taken : end]
        self._taken = end
        return taken

    @property
    def num_threads(self) -> int:
        """Cores that take tiles."""
        return self._workers.num_threads

    def leading(self) -> AbstractContextManager[None]:
        """See `Workers.leading`: for all that goes before and after tiles."""
        return self._workers.leading()

    def tensors(self, index: LayerIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """An index's codes, and what queries are multiplied with to ask for scores in base 2.

        That is [num_kv_heads, head_dim, RANK + 1]: the axes, and beside them the centre.
        """
        if id(index) not in self._tensors:  # it is kept, so that no other gets its id
            axes, centre = as_tensor(index.axes), as_tensor(index.centre)
            asked = torch.cat((axes, centre.unsqueeze(-1)), dim=-1) * LOG2_E
            self._tensors[id(index)] = index, as_tensor(index.codes), asked
        return self._tensors[id(index)][1:]

    def products(self, weights: torch.Tensor) -> Products:
        """What multiplies codes with `weights` [num_kv_heads, rows, RANK] float32."""
        return ByteProducts(weights) if self._by_bytes else FloatProducts(weights)

    def share_out(self, count: int, work: Callable[[int, Scratch], None]) -> None:
        """Does `work` for numbers below `count`, as many consecutive ones on each core."""
        self._workers.share_out(count, work, self._scratches)


class IndexTerms:
    """See `Terms`: by the index of a piece.

    Args:
        index: Of the piece.
        queries: [num_queries, num_qo_heads, head_dim] float32, times 1 / sqrt(head_dim).
        first: First position, counted from the piece's first.
        last: Position after the last.
        allowed: [last - first] bool, which of them count; None is all.
        room: Where terms are kept.
    """

    def __init__(
        self,
        index: LayerIndex,
        queries: torch.Tensor,
        first: int,
        last: int,
        allowed: torch.Tensor | None,
        room: Room,
    ) -> None:
        self._codes, asked = room.tensors(index)
        self._first, self._last, self._allowed, self._room = first, last, allowed, room
        num_kv, head_dim, _ = asked.shape  # rows are queries' heads, by KV head
        rows = queries.view(len(queries), num_kv, -1, head_dim).transpose(0, 1)
        weights = rows.reshape(num_kv, -1, head_dim) @ asked
        self._products = products = room.products(weights[..., :RANK])
        offsets = weights[..., RANK] - products.weights.sum(dim=-1) * MIDDLE
        peaks = products.refer_to(self._sample())
        num_rows = peaks.numel()
        begin, end = first // PAGE, -(-last // PAGE)
        pages = products.num_pages(end - begin, room.num_threads)
        self._starts = [page * PAGE for page in range(begin, end, pages)]
        self._tiles = [
            room.take(num_rows * (stop - start)).view(num_rows, -1)
            for start, stop in zip(self._starts, [*self._starts[1:], end * PAGE], strict=True)
        ]
        sums = torch.empty(len(self._tiles), num_rows)
        room.share_out(len(self._tiles), lambda at, scratch: self._raise(at, scratch, sums[at]))
        self._scale = -(peaks + offsets).flatten()  # log2 of what makes terms of what is kept
        self.lse = sums.sum(dim=0).log2() - self._scale

    def _sample(self) -> torch.Tensor:
        """Codes [num_kv_heads, n, RANK] of some of the keys that count; none if none does."""
        first, last = -(-self._first // PAGE) * HALF, self._last // PAGE * HALF
        if self._allowed is None and first < last:  # whole pages: no need to look at single keys
            packed = self._codes[:, first : last : _stride(2 * (last - first))]
            return torch.cat((packed & (LEVELS - 1), packed >> 4), dim=1)
        if self._allowed is None:
            at = torch.arange(self._first, self._last)
        else:
            at = self._allowed.nonzero().squeeze(1) + self._first
        at = at[:: _stride(len(at))]
        packed = self._codes[:, at // PAGE * HALF + at % HALF]
        return (packed >> (at % PAGE // HALF * 4).byte()[:, None]) & (LEVELS - 1)

    def _raise(self, at: int, scratch: Scratch, sums: torch.Tensor) -> None:
        """Fills a tile with bits of terms, and `sums` [num_rows]."""
        bits = self._tiles[at]
        start, width = self._starts[at], bits.shape[1]
        packed = self._codes[:, start // 2 : (start + width) // 2]
        self._products.fill(scratch, packed, bits.view(len(packed), -1, width))
        terms = bits.view(torch.float32)
        self._leave_out(terms, start)
        torch.sum(terms, dim=-1, out=sums)

    def _leave_out(self, terms: torch.Tensor, start: int) -> None:
        """Takes away the terms, of a tile from position `start` on, of keys that do not count."""
        num_rows, width = terms.shape
        low, high = max(self._first - start, 0), min(self._last - start, width)
        halves = terms.view(num_rows, 2, -1, HALF)
        for half in range(2):
            # Less than a page is left over at either end.
            if low > half * HALF:
                halves[:, half, 0, : low - half * HALF] = 0.0
            kept = high - (width - PAGE) - half * HALF
            if kept < HALF:
                halves[:, half, -1, max(kept, 0) :] = 0.0
        if self._allowed is not None:
            allowed = self._allowed[start + low - self._first : start + high - self._first]
            inside = torch.arange(low, high)[~allowed]
            terms.index_fill_(1, _places(inside, width), 0.0)

    def votes(self, shares: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """See `Terms.votes`."""
        scales = shares * torch.exp2(-self._scale - lse)
        begin = self._starts[0]
        out = torch.empty(self._starts[-1] + self._tiles[-1].shape[1] - begin)

        def add_up(at: int, scratch: Scratch) -> None:
            terms = self._tiles[at].view(torch.float32)
            summed = (scales @ terms).view(2, -1, HALF).transpose(0, 1)
            out[self._starts[at] - begin :][: terms.shape[1]].view(-1, 2, HALF).copy_(summed)

        self._room.share_out(len(self._tiles), add_up)
        return out[self._first - begin : self._last - begin]

    def mass(self, at: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """See `Terms.mass`."""
        at = at + self._first
        sums = torch.zeros_like(lse)
        edges = torch.tensor([*self._starts, self._last])
        cuts = torch.searchsorted(at, edges).tolist()
        for start, tile, low, high in zip(self._starts, self._tiles, cuts, cuts[1:], strict=False):
            place = _places(at[low:high] - start, tile.shape[1])
            sums += tile.view(torch.float32).index_select(1, place).sum(dim=-1)
        return sums * torch.exp2(-self._scale - lse)


def _stride(count: int) -> int:
    return -(-max(count, 1) // PEAK_SAMPLE)


def _places(at: torch.Tensor, width: int) -> torch.Tensor:
    """Where, of `width` keys of whole pages, those at `at` are: first halves before second ones."""
    return at % PAGE // HALF * (width // 2) + at // PAGE * HALF + at % HALF


def log2_sum(exponents: torch.Tensor, dim: int) -> torch.Tensor:
    """log2 of the sum of 2^exponents."""
    return torch.logsumexp(exponents / LOG2_E, dim=dim) * LOG2_E
