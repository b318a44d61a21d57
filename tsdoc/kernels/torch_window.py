"""What one decode selection attends to on the CPU, gathered and rotated once."""

from __future__ import annotations

import torch

from tsdoc.kernels.attention import chunk_attention
from tsdoc.kernels.piece_rows import PieceRows
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import ChunkRange, attended_positions

ROOM = 128  # rows a window can grow by before it is copied


class TorchWindow:
    """See `Window`: k (rotated) and v, [num_kv_heads, length, head_dim] in larger buffers.

    Args:
        rows: K and V of the prompt.
        layer: Which layer.
        rope: Table that covers the window as it grows.
        k: Its first `length` rows are what it begins with, rotated; the others are room to grow.
        v: Same shape.
        length: Rows at first.
    """

    def __init__(
        self,
        rows: PieceRows,
        layer: int,
        rope: RopeTable,
        k: torch.Tensor,
        v: torch.Tensor,
        length: int,
    ) -> None:
        self._rows = rows
        self._layer = layer
        self._rope = rope
        self._length = length
        self._k, self._v = k, v

    def attend(self, q: torch.Tensor, position: int) -> torch.Tensor:
        """See `Window.attend`."""
        if self._length == self._k.shape[1]:
            self._k, self._v = _with_room(self._k), _with_room(self._v)
        own = slice(self._length, self._length + 1)
        k, v = self._rows.gather(self._layer, torch.tensor([[position]]))
        self._rope.rotate(k, own, out=self._k[:, own])
        self._v[:, own] = v
        self._length += 1
        heads = self._rope.rotate(q.float().transpose(0, 1), own)
        rows = slice(0, self._length)
        out = chunk_attention(
            heads, self._k[:, rows], self._v[:, rows], num_before=self._length - 1
        )
        return out.transpose(0, 1)


class TorchWindows:
    """Opens windows of one prompt, a layer's always in the same memory.

    Fresh memory for each would cost more than filling it.

    Args:
        rows: K and V of the prompt.
        rope: Table for all compact positions.
    """

    def __init__(self, rows: PieceRows, rope: RopeTable) -> None:
        self._rows = rows
        self._rope = rope
        self._rooms: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._plain = torch.empty(0)  # K before RoPE

    def open(self, layer: int, selected: torch.Tensor, around: ChunkRange) -> TorchWindow:
        """See `DeviceCache.open_window`."""
        positions = attended_positions(selected, around, around.start)
        length = positions.shape[1]
        k, v = self._room(layer, length)
        plain = self._plain[:, :length]
        self._rows.gather(layer, positions, out=(plain, v[:, :length]))
        self._rope.rotate(plain, slice(0, length), out=k[:, :length])
        return TorchWindow(self._rows, layer, self._rope, k, v, length)

    def _room(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers [num_kv_heads, > length, head_dim] of a layer's window."""
        room = self._rooms.get(layer)
        if room is None or room[0].shape[1] <= length:
            shape = (self._rows.num_kv_heads, length + ROOM, self._rows.head_dim(layer))
            room = self._rooms[layer] = (torch.empty(shape), torch.empty(shape))
            if self._plain.numel() < room[0].numel():
                self._plain = torch.empty(shape)
        return room


def _with_room(rows: torch.Tensor) -> torch.Tensor:
    buffer = rows.new_empty(rows.shape[0], rows.shape[1] + ROOM, rows.shape[2])
    buffer[:, : rows.shape[1]] = rows
    return buffer
