"""One rank's part of a cache on several machines, which share no memory.

Rank 0 has all of K and V in the pieces, where the store keeps them. Every other rank has those of
its own heads in memory of its own: it is sent what was there before, and sends what it computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.interface import DeviceCache
from tsdoc.kernels.kv import KVArray, KVPiece, MemoryPiece
from tsdoc.kernels.ranks import Mesh
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.sharded_cache import ShardedBackend, ShardedCache
from tsdoc.kernels.shards import HeadShard
from tsdoc.kernels.shared_kv import HeadPiece
from tsdoc.kernels.token_share import SHARE_TOKENS, TokenShare
from tsdoc.kernels.torch_cache import Arrived
from tsdoc.kernels.workers import Workers

SENT_TOKENS = 2048  # in one message


class SpreadBackend(ShardedBackend):
    """See `Backend`: CPUs of several machines.

    Args:
        shard: This rank's heads.
        mesh: All ranks.
        num_layers: Layers of the model.
        head_dim: Numbers per head.
        kv_dtype: "bfloat16" or "float32".
        workers: Take the chunks of a block.
        share_tokens: Consecutive tokens that a rank of the sequence axis has.
    """

    def __init__(
        self,
        shard: HeadShard,
        mesh: Mesh,
        *,
        num_layers: int,
        head_dim: int,
        kv_dtype: str,
        workers: Workers | None = None,
        share_tokens: int = SHARE_TOKENS,
    ) -> None:
        super().__init__(shard, mesh, workers, share_tokens=share_tokens)
        self._num_layers = num_layers
        self._head_dim = head_dim
        self._kv_dtype = kv_dtype
        self._share = TokenShare(ranks=mesh.sequence, unit=share_tokens)

    def own_piece(self, start: int, capacity: int) -> MemoryPiece:
        """Room for K and V of this rank's heads, of tokens [start, start + capacity)."""
        return MemoryPiece(
            start=start,
            capacity=capacity,
            num_layers=self._num_layers,
            num_kv_heads=self._shard.num_kv_heads,
            head_dim=self._head_dim,
            kv_dtype=self._kv_dtype,
        )

    def cache(
        self,
        pieces: Sequence[KVPiece],
        rope: RopeTable,
        config: SelectionConfig,
        index: IndexWatch | None = None,
    ) -> SpreadCache:
        """See `Backend.cache`; `pieces` are those of `own_piece`, on rank 0 those of all heads."""
        shard, mesh = self._shard, self._mesh
        own = [HeadPiece(piece, shard.kv) for piece in pieces] if mesh.world.rank == 0 else pieces
        inner = self._inner.cache(own, rope, config)
        return SpreadCache(inner, pieces, shard, mesh, self._share, self._num_layers)


class SpreadCache(ShardedCache):
    """See `DeviceCache`: each rank reads and writes what it has; `save` brings it to rank 0.

    Args:
        inner: Over this rank's K and V; its election is held by all ranks.
        pieces: On rank 0 those of all heads, elsewhere this rank's own.
        shard: This rank's heads.
        mesh: All ranks.
        share: This rank's tokens.
        num_layers: Layers of the model.
    """

    def __init__(
        self,
        inner: DeviceCache,
        pieces: Sequence[KVPiece],
        shard: HeadShard,
        mesh: Mesh,
        share: TokenShare,
        num_layers: int,
    ) -> None:
        super().__init__(inner, inner, shard, mesh)
        self._pieces = list(pieces)
        self._share = share
        self._num_layers = num_layers
        self._leads = mesh.world.rank == 0

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `DeviceCache.write`: this rank's heads, those that others have too among them."""
        self._inner.write(layer, start, k, v)

    def load(self, end: int) -> None:
        """See `DeviceCache.load`: every rank is sent all of [0, end), and keeps its heads."""
        for piece, first, last in self._parts(0, end):
            for layer, room in self._rooms(piece, first, last):
                rows = np.empty(self._whole(room), dtype=room.dtype)
                if self._leads:
                    piece.read(layer, first, rows)
                self._mesh.world.from_first(torch.from_numpy(rows.view(np.uint8)))
                if not self._leads:
                    np.copyto(room, rows[:, :, slice(*self._shard.kv)])

    def save(self, start: int, end: int) -> Arrived:
        """See `DeviceCache.save`: each head and token comes from the one rank that answers for it.

        Bits are added up to zeros, so that every number arrives as it is.
        """
        kv, (first_head, last_head) = self._shard.kv, self._shard.owned
        base = 0 if self._leads else kv[0]
        held = slice(first_head - base, last_head - base)
        for piece, first, last in self._parts(start, end):
            mine = self._share.mine(torch.arange(first, last)).numpy()
            for layer, room in self._rooms(piece, first, last):
                bits = np.zeros(self._whole(room), dtype=np.int32)
                bits[mine, :, first_head:last_head] = _as_bits(room[mine, :, held])
                self._mesh.world.sum_at_first(torch.from_numpy(bits))
                if self._leads:
                    piece.write(layer, first, _from_bits(bits, room.dtype))
        return Arrived()

    def _parts(self, start: int, end: int) -> Iterator[tuple[KVPiece, int, int]]:
        """Pieces and positions [first, last) of theirs that go in one message."""
        for piece in self._pieces:
            stop = min(end, piece.start + piece.capacity)
            for first in range(max(start, piece.start), stop, SENT_TOKENS):
                yield piece, first, min(stop, first + SENT_TOKENS)

    def _rooms(self, piece: KVPiece, first: int, last: int) -> Iterator[tuple[int, KVArray]]:
        """Each layer and its rows [last - first, 2, heads, head_dim] in a piece."""
        rows = slice(first - piece.start, last - piece.start)
        for layer in range(self._num_layers):
            yield layer, piece.rows(layer)[rows]

    def _whole(self, room: KVArray) -> tuple[int, ...]:
        """Shape of the same rows with all KV heads of the model."""
        return len(room), 2, self._shard.num_qo_heads // self._shard.group, room.shape[-1]


def _as_bits(rows: KVArray) -> npt.NDArray[np.int32]:
    return rows.view(np.int32) if rows.dtype == np.float32 else rows.astype(np.int32)


def _from_bits(bits: npt.NDArray[np.int32], dtype: np.dtype[Any]) -> KVArray:
    rows: KVArray = bits.view(np.float32) if dtype == np.float32 else bits.astype(np.uint16)
    return rows
