"""One rank's part of a cache on several GPUs: each holds the K and V of its own heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.ranks import Mesh
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.sharded_cache import ShardedCache
from tsdoc.kernels.shards import HeadShard
from tsdoc.kernels.shared_kv import HeadPiece
from tsdoc.kernels.torch_cache import Arrived
from tsdoc.kernels.triton_backend import TritonBackend


class ShardedTritonBackend:
    """See `Backend`: one of several CUDA devices.

    Args:
        inner: This rank's device, whose votes are added up over all ranks.
        shard: This rank's heads, none of which has to be padded (`shard_groups`).
        mesh: All ranks.
    """

    save_ahead = 0  # a block is kept once all ranks have brought their heads of it

    def __init__(self, inner: TritonBackend, shard: HeadShard, mesh: Mesh) -> None:
        self.device = inner.device
        self._inner = inner
        self._shard = shard
        self._mesh = mesh

    def cache(
        self,
        pieces: Sequence[KVPiece],
        rope: RopeTable,
        config: SelectionConfig,
        index: IndexWatch | None = None,
    ) -> ShardedTritonCache:
        """See `Backend.cache`; every key is scored, whatever `index` there is."""
        own = [HeadPiece(piece, self._shard.kv, self._shard.owned) for piece in pieces]
        inner = self._inner.cache(own, rope, config)
        return ShardedTritonCache(inner, inner, self._shard, self._mesh)


class ShardedTritonCache(ShardedCache):
    """See `DeviceCache`: K and V of this rank's heads, on its own device."""

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `DeviceCache.write`."""
        self._inner.write(layer, start, k, v)

    def save(self, start: int, end: int) -> Arrived:
        """See `DeviceCache.save`: all ranks' heads have arrived once this returns."""
        self._inner.save(start, end).wait()
        self._mesh.world.wait()
        return Arrived()
