"""One rank's part of a cache whose heads are spread over several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tsdoc.kernels.election import JointElection
from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.interface import DeviceCache, DeviceDecode, Pending, Ranges, Window
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.ranks import Mesh
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import ChunkRange, SelectionConfig
from tsdoc.kernels.sequence_cache import SequenceBackend
from tsdoc.kernels.sequence_selection import SequenceElection
from tsdoc.kernels.shards import HeadShard
from tsdoc.kernels.shared_kv import HeadPiece
from tsdoc.kernels.token_share import SHARE_TOKENS, TokenShare
from tsdoc.kernels.torch_cache import Arrived, TorchBackend
from tsdoc.kernels.workers import Workers


class ShardedBackend:
    """See `Backend`: the CPU; K and V lie in memory that all ranks map, each reads its own heads.

    Args:
        shard: This rank's heads.
        mesh: All ranks.
        workers: Take the chunks of a block.
        share_tokens: Consecutive tokens that a rank of the sequence axis has.
    """

    save_ahead = 0

    def __init__(
        self,
        shard: HeadShard,
        mesh: Mesh,
        workers: Workers | None = None,
        *,
        share_tokens: int = SHARE_TOKENS,
    ) -> None:
        self.device = torch.device("cpu")
        self._shard = shard
        self._mesh = mesh
        first, last = shard.owned
        election = JointElection(shard, mesh.world)
        share = TokenShare(ranks=mesh.sequence, unit=share_tokens)

        def backend(num_kv_heads: int) -> TorchBackend:
            if mesh.sequence.size == 1:
                return TorchBackend(num_kv_heads=num_kv_heads, election=election, workers=workers)
            return SequenceBackend(
                num_kv_heads=num_kv_heads,
                election=SequenceElection(election, share),
                workers=workers,
                share=share,
            )

        self._inner = backend(shard.num_kv_heads)
        self._writer = backend(last - first)

    def cache(
        self,
        pieces: Sequence[KVPiece],
        rope: RopeTable,
        config: SelectionConfig,
        index: IndexWatch | None = None,
    ) -> ShardedCache:
        """See `Backend.cache`; every key is scored, whatever `index` there is."""
        own = [HeadPiece(piece, self._shard.kv) for piece in pieces]
        owned = [HeadPiece(piece, self._shard.owned) for piece in pieces]
        return ShardedCache(
            self._inner.cache(own, rope, config),
            self._writer.cache(owned, rope, config),
            self._shard,
            self._mesh,
        )


class ShardedWindow:
    """See `Window`: this rank's heads."""

    def __init__(self, inner: Window, shard: HeadShard) -> None:
        self._inner = inner
        self._shard = shard

    def attend(self, q: torch.Tensor, position: int) -> torch.Tensor:
        """See `Window.attend`."""
        return self._shard.real(self._inner.attend(self._shard.pad(q), position), 1)


class ShardedCache:
    """See `DeviceCache`: the heads of one rank; what needs all heads is decided together.

    Args:
        inner: Over this rank's KV heads; its election is held by all ranks.
        writer: Over those of them that this rank writes.
        shard: This rank's heads.
        mesh: All ranks.
    """

    def __init__(
        self, inner: DeviceCache, writer: DeviceCache, shard: HeadShard, mesh: Mesh
    ) -> None:
        self._inner = inner
        self._writer = writer
        self._shard = shard
        self._mesh = mesh

    def load(self, end: int) -> None:
        """See `DeviceCache.load`."""
        self._inner.load(end)
        self._mesh.world.wait()

    def save(self, start: int, end: int) -> Pending:
        """See `DeviceCache.save`: all ranks have written their part once this returns."""
        self._mesh.world.wait()
        return Arrived()

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `DeviceCache.write`."""
        first, last = self._shard.owned
        own = slice(first - self._shard.kv[0], last - self._shard.kv[0])
        self._writer.write(layer, start, k[:, own], v[:, own])
        if self._shard.replicates:
            self._mesh.world.wait()  # a rank reads what another one wrote

    def selection_queries(self, q: torch.Tensor, ranges: Sequence[ChunkRange]) -> torch.Tensor:
        """See `DeviceCache.selection_queries`."""
        return self._inner.selection_queries(q, ranges)

    def select(
        self,
        layer: int,
        queries: torch.Tensor,
        ranges: Sequence[ChunkRange],
        allowed: Ranges | None = None,
    ) -> Sequence[torch.Tensor]:
        """See `DeviceCache.select`."""
        return self._inner.select(layer, self._shard.pad(queries), ranges, allowed)

    def attend_chunks(
        self,
        layer: int,
        q: torch.Tensor,
        selected: Sequence[torch.Tensor],
        ranges: Sequence[ChunkRange],
    ) -> torch.Tensor:
        """See `DeviceCache.attend_chunks`."""
        out = self._inner.attend_chunks(layer, self._shard.pad(q), selected, ranges)
        return self._shard.real(out, 1)

    def attend(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> torch.Tensor:
        """See `DeviceCache.attend`."""
        return self.attend_chunks(layer, q, [selected], [around])

    def soft_votes(self, layer: int, q: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """See `DeviceCache.soft_votes`."""
        return self._mean(self._inner.soft_votes(layer, self._shard.pad(q), start, end))

    def attention_mass(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> torch.Tensor:
        """See `DeviceCache.attention_mass`."""
        return self._mean(self._inner.attention_mass(layer, self._shard.pad(q), selected, around))

    def _mean(self, own: torch.Tensor) -> torch.Tensor:
        """The mean over all heads from that over each rank's own."""
        return self._mesh.tensor.sum(own * (self._shard.num_heads / self._shard.num_qo_heads))

    def open_window(self, layer: int, selected: torch.Tensor, around: ChunkRange) -> ShardedWindow:
        """See `DeviceCache.open_window`."""
        return ShardedWindow(self._inner.open_window(layer, selected, around), self._shard)

    def start_decode(
        self, position: int, *, theta: float | None, max_hits: int, allowed: Ranges | None
    ) -> ShardedDecode | None:
        """See `DeviceCache.start_decode`: the device decides where that of all ranks does."""
        inner = self._inner.start_decode(position, theta=theta, max_hits=max_hits, allowed=allowed)
        if inner is None:
            return None
        begun = {"position": position, "theta": theta, "max_hits": max_hits, "allowed": allowed}
        return ShardedDecode(inner, self, begun, self._shard)


class ShardedDecode:
    """See `DeviceDecode`: this rank's heads.

    Args:
        inner: Decides together with the other ranks.
        cache: Whose answer this is.
        begun: How `start_decode` was called, for ranks that repeat it.
        shard: This rank's heads.
    """

    def __init__(
        self,
        inner: DeviceDecode,
        cache: ShardedCache,
        begun: Mapping[str, object],
        shard: HeadShard,
    ) -> None:
        self._inner = inner
        self._shard = shard
        self.cache = cache
        self.begun = begun

    @property
    def position(self) -> torch.Tensor:
        """See `DeviceDecode.position`."""
        return self._inner.position

    @property
    def num_lookups(self) -> int:
        """See `DeviceDecode.num_lookups`."""
        return self._inner.num_lookups

    @property
    def num_hits(self) -> int:
        """See `DeviceDecode.num_hits`."""
        return self._inner.num_hits

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `DeviceDecode.attend`."""
        return self._shard.real(self._inner.attend(layer, self._shard.pad(q), k, v), 1)

    def run(self, step: Callable[[torch.Tensor], torch.Tensor], token: int) -> torch.Tensor:
        """See `DeviceDecode.run`."""
        return self._inner.run(step, token)
