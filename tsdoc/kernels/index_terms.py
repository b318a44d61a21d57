"""What queries' softmax terms are by the key index alone, on the CPU: the terms of one piece.

A term is 2^x of an approximate score x, in base 2. It is made without an exponential: the bits of a
float32 are, but for a constant, its logarithm with the fraction between two powers of two taken as
a straight line, so x becomes 2^x by being scaled, rounded and read as a float32. That is at most
6 % off, evenly, where a score is off by a third; the mean is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from tsdoc.kernels.index import HALF, LEVELS, PAGE, RANK, query_weights
from tsdoc.kernels.kv import LayerIndex
from tsdoc.kernels.piece_rows import as_tensor
from tsdoc.kernels.workers import Workers

LOG2_E = math.log2(math.e)
TILE_PAGES = 64  # at most, that are worked on at a time
TILE_BYTES = 1 << 20  # of terms, likewise
PEAK_SAMPLE = 256  # keys among which the greatest score is looked for
LOW_CODES = 0x0F0F0F0F  # of four bytes
MANTISSA = 1 << 23
ONE = 127 * MANTISSA  # the bits of 1.0
LINE = math.log2(0.5 / math.log(2) ** 2)  # how much the straight line lies above, on average
GREATEST = 100  # terms are at most 2^100 times the sample's greatest, so that sums are finite


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


class Scratch:
    """What one core unpacks codes into."""

    def __init__(self) -> None:
        self._halves = torch.empty(0, dtype=torch.int32)
        self._codes = torch.empty(0)
        self._out = torch.empty(0)

    def products(
        self, bias: torch.Tensor, weights: torch.Tensor, packed: torch.Tensor
    ) -> torch.Tensor:
        """Bias [num_kv_heads, rows, 1] and weights times codes, [num_kv_heads, rows, keys].

        Args:
            bias: Of each row.
            weights: [num_kv_heads, rows, RANK].
            packed: [num_kv_heads, keys / 2, RANK] uint8; low codes come before all high ones.
        """
        num_kv, lines, _ = packed.shape
        shape = (num_kv, 2, lines, RANK // 4)
        if self._halves.shape != shape:
            self._halves = torch.empty(shape, dtype=torch.int32)
            self._codes = torch.empty(num_kv, 2, lines, RANK)
        if self._out.shape != (num_kv, weights.shape[1], 2 * lines):
            self._out = torch.empty(num_kv, weights.shape[1], 2 * lines)
        words = packed.view(torch.int32)  # four codes at a time
        low, high = self._halves.unbind(1)
        torch.bitwise_and(words, LOW_CODES, out=low)
        torch.bitwise_right_shift(words, 4, out=high)
        high.bitwise_and_(LOW_CODES)
        self._codes.copy_(self._halves.view(torch.uint8))
        codes = self._codes.flatten(1, 2).mT
        return torch.baddbmm(bias, weights, codes, out=self._out)


class Room:
    """Memory for terms and what leads to them, used again: fresh memory costs more than arithmetic.

    Args:
        workers: Take tiles of keys, each with a scratch of its own.
    """

    def __init__(self, workers: Workers | None = None) -> None:
        self._workers = workers or Workers(1)
        self._scratches = [Scratch() for _ in range(self._workers.num_threads)]
        self._bits = torch.empty(0, dtype=torch.int32)
        self._taken = 0

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

    def share_out(self, count: int, work: Callable[[int, Scratch], None]) -> None:
        """Does `work` for numbers below `count`, as many consecutive ones on each core."""
        each = max(1, -(-count // self._workers.num_threads))
        shares = [range(at, min(at + each, count)) for at in range(0, count, each)]
        with self._workers.leading():
            self._workers.run(
                [
                    partial(_work_on, share, work, scratch)
                    for share, scratch in zip(shares, self._scratches, strict=False)
                ]
            )


def _work_on(share: range, work: Callable[[int, Scratch], None], scratch: Scratch) -> None:
    for at in share:
        work(at, scratch)


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
        self._codes = as_tensor(index.codes)
        self._first, self._last, self._allowed, self._room = first, last, allowed, room
        axes, centre = as_tensor(index.axes), as_tensor(index.centre)
        num_kv = len(axes)
        weights, offsets = query_weights(queries * LOG2_E, axes, centre)
        grouped = len(queries), num_kv, -1  # rows are queries' heads, by KV head
        weights = weights.view(*grouped, RANK).transpose(0, 1).reshape(num_kv, -1, RANK)
        offsets = offsets.view(grouped).transpose(0, 1).flatten()
        peaks = self._peaks(weights)
        self._weights = weights * MANTISSA
        self._bias = (ONE - MANTISSA * LINE) - MANTISSA * peaks
        num_rows = weights.shape[:2].numel()
        self._pages = max(1, min(TILE_PAGES, TILE_BYTES // (4 * PAGE * num_rows)))
        firsts = range(first // PAGE, -(-last // PAGE), self._pages)
        self._starts = [page * PAGE for page in firsts]
        ends = [min(start + self._pages * PAGE, -(-last // PAGE) * PAGE) for start in self._starts]
        self._tiles = [
            room.take(num_rows * (end - start)).view(num_rows, -1)
            for start, end in zip(self._starts, ends, strict=True)
        ]
        sums = torch.empty(len(self._tiles), num_rows)
        room.share_out(len(self._tiles), lambda at, scratch: self._raise(at, scratch, sums[at]))
        self._scale = -(peaks.flatten() + offsets)  # log2 of what makes terms of what is kept
        self.lse = sums.sum(dim=0).log2() - self._scale

    def _peaks(self, weights: torch.Tensor) -> torch.Tensor:
        """Greatest products [num_kv_heads, rows, 1] of a sample of the keys that count."""
        at = torch.arange(self._first, self._last)
        at = at if self._allowed is None else at[self._allowed]
        at = at[:: -(-max(len(at), 1) // PEAK_SAMPLE)]
        if not len(at):
            return torch.zeros(*weights.shape[:2], 1)
        lines = at // PAGE * HALF + at % HALF
        packed = self._codes[:, lines]
        codes = (packed >> (at % PAGE // HALF * 4).byte()[:, None]) & (LEVELS - 1)
        return torch.bmm(weights, codes.float().mT).amax(dim=-1, keepdim=True)

    def _raise(self, at: int, scratch: Scratch, sums: torch.Tensor) -> None:
        """Fills a tile with bits of terms, and `sums` [num_rows]."""
        bits = self._tiles[at]
        num_rows, width = bits.shape
        start = self._starts[at] // 2
        packed = self._codes[:, start : start + width // 2]
        products = scratch.products(self._bias, self._weights, packed)
        products.clamp_(0, ONE + GREATEST * MANTISSA)
        bits.copy_(products.view(num_rows, width))
        terms = bits.view(torch.float32)
        self._leave_out(terms, self._starts[at])
        torch.sum(terms, dim=-1, out=sums)

    def _leave_out(self, terms: torch.Tensor, start: int) -> None:
        """Takes away the terms, of a tile from position `start` on, of keys that do not count."""
        width = terms.shape[1]
        low, high = max(self._first - start, 0), min(self._last - start, width)
        if low > 0 or high < width:
            outside = torch.cat((torch.arange(low), torch.arange(high, width)))
            terms.index_fill_(1, _places(outside, width), 0.0)
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
            inside = at[low:high] - start
            place = _places(inside, tile.shape[1])
            sums += tile.view(torch.float32).index_select(1, place).sum(dim=-1)
        return sums * torch.exp2(-self._scale - lse)


def _places(at: torch.Tensor, width: int) -> torch.Tensor:
    """Where, of `width` keys of whole pages, those at `at` are: first halves before second ones."""
    return at % PAGE // HALF * (width // 2) + at // PAGE * HALF + at % HALF


def log2_sum(exponents: torch.Tensor, dim: int) -> torch.Tensor:
    """log2 of the sum of 2^exponents."""
    return torch.logsumexp(exponents / LOG2_E, dim=dim) * LOG2_E
