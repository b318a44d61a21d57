"""What one decode selection attends to on the CPU, gathered and rotated once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tsdoc.kernels.attention import chunk_attention
from tsdoc.kernels.rope import RopeTable

Gather = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

ROOM = 128  # rows a window can grow by before it is copied


class TorchWindow:
    """See `Window`: k (rotated) and v, [num_kv_heads, length, head_dim] in larger buffers.

    Args:
        gather: K and V at positions [num_sets, n], each [num_kv_heads, n, head_dim].
        rope: Table that covers the window as it grows.
        k: Its first `length` rows are what it begins with, rotated; the others are room to grow.
        v: Same shape.
        length: Rows at first.
    """

    def __init__(
        self, gather: Gather, rope: RopeTable, k: torch.Tensor, v: torch.Tensor, length: int
    ) -> None:
        self._gather = gather
        self._rope = rope
        self._length = length
        self._k, self._v = k, v

    def attend(self, q: torch.Tensor, position: int) -> torch.Tensor:
        """See `Window.attend`."""
        if self._length == self._k.shape[1]:
            self._k, self._v = _with_room(self._k), _with_room(self._v)
        own = slice(self._length, self._length + 1)
        k, v = self._gather(torch.tensor([[position]]))
        self._k[:, own] = self._rope.rotate(k, own)
        self._v[:, own] = v
        self._length += 1
        heads = self._rope.rotate(q.float().transpose(0, 1), own)
        rows = slice(0, self._length)
        out = chunk_attention(
            heads, self._k[:, rows], self._v[:, rows], num_before=self._length - 1
        )
        return out.transpose(0, 1)


def _with_room(rows: torch.Tensor) -> torch.Tensor:
    buffer = rows.new_empty(rows.shape[0], rows.shape[1] + ROOM, rows.shape[2])
    buffer[:, : rows.shape[1]] = rows
    return buffer
