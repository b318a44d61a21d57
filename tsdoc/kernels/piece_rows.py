"""Rows of K and V where they lie, in pieces that cover a prompt, as torch tensors on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tsdoc.kernels.kv import KVPiece


class PieceRows:
    """K and V of one prompt, checked when they are used.

    Args:
        pieces: Cover the prompt from 0 on without gaps; the last ones may still be unwritten.
        num_kv_heads: Heads of K and V.

    Attributes:
        pieces: The same.
        num_kv_heads: The same.
    """

    def __init__(self, pieces: Sequence[KVPiece], num_kv_heads: int) -> None:
        self.pieces = list(pieces)
        self.num_kv_heads = num_kv_heads
        self._tensors: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, piece: KVPiece, layer: int) -> torch.Tensor:
        """K and V of a piece, [capacity, 2, num_kv_heads, head_dim] on its own memory."""
        key = (piece.start, layer)
        if key not in self._tensors:
            self._tensors[key] = as_tensor(piece.rows(layer))
        return self._tensors[key]

    def head_dim(self, layer: int) -> int:
        """Numbers per head."""
        return self.of(self.pieces[0], layer).shape[-1]

    def open(self, layer: int) -> None:
        """Makes the tensors of a layer, before threads use them: process-wide filters change."""
        for piece in self.pieces:
            self.of(piece, layer)

    def covering(self, start: int, end: int) -> list[tuple[KVPiece, int, int]]:
        """Pieces that hold positions of [start, end), each with its share of the range."""
        shares = [
            (piece, max(start, piece.start), min(end, piece.start + piece.capacity))
            for piece in self.pieces
        ]
        return [(piece, first, last) for piece, first, last in shares if first < last]

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes K and V [num_tokens, num_kv_heads, head_dim] of tokens from `start` on."""
        for piece, first, last in self.covering(start, start + k.shape[0]):
            inside = slice(first - piece.start, last - piece.start)
            outside = slice(first - start, last - start)
            piece.check_range(layer, first, last)  # not what is written now, but that there is room
            rows = self.of(piece, layer)
            rows[inside, 0], rows[inside, 1] = k[outside], v[outside]

    def check(self, layer: int, positions: torch.Tensor) -> None:
        """Checks K and V at `positions` [n], ascending."""
        absolute = positions.numpy()
        for piece in self.pieces:
            piece.check_rows(layer, absolute)

    def gather(
        self,
        layer: int,
        positions: torch.Tensor,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at positions, in float32.

        Args:
            layer: Which layer.
            positions: [num_sets, n], each row ascending; a set is for as many heads as another.
            out: Where they go; None is fresh memory.

        Returns:
            K and V, each [num_kv_heads, n, head_dim].
        """
        k, v = out or (self._fresh(layer, positions), self._fresh(layer, positions))
        self._take(layer, positions, [k, v])
        return k, v

    def gather_keys(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """K alone; see `gather`."""
        k = self._fresh(layer, positions)
        self._take(layer, positions, [k])
        return k

    def _fresh(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        return torch.empty(self.num_kv_heads, positions.shape[1], self.head_dim(layer))

    def _take(self, layer: int, positions: torch.Tensor, out: Sequence[torch.Tensor]) -> None:
        """Fills K, or K and V; rows lie apart, so both of one are fetched at once."""
        heads_per_set = self.num_kv_heads // positions.shape[0]
        for piece in self.pieces:
            bounds = torch.tensor([piece.start, piece.start + piece.capacity])
            rows = self.of(piece, layer)[:, : len(out)]
            for number, row in enumerate(positions):
                first, last = torch.searchsorted(row, bounds).tolist()
                if first == last:
                    continue
                where = row[first:last]
                piece.check_rows(layer, where.numpy())
                heads = slice(number * heads_per_set, (number + 1) * heads_per_set)
                found = rows[:, :, heads].index_select(0, where - piece.start)
                for target, part in zip(out, found.unbind(1), strict=True):
                    target[heads, first:last].copy_(part.transpose(0, 1))


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Shares memory with `array`; uint16 holds bfloat16 bit patterns."""
    with warnings.catch_warnings():
        # Committed pages are mapped read-only, and nothing here writes to them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
