"""The `triton` backend's cache: K and V of one prompt in device pages, read by Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.interface import Ranges
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import ChunkRange, SelectionConfig
from tsdoc.kernels.transfer import Moving
from tsdoc.kernels.triton.query import selection_queries
from tsdoc.kernels.triton.store import store_kv
from tsdoc.kernels.triton_answers import TritonDecode
from tsdoc.kernels.triton_attention import ChunkAttention, TritonWindow
from tsdoc.kernels.triton_decode import make_setup
from tsdoc.kernels.triton_evidence import attention_mass, soft_votes
from tsdoc.kernels.triton_parts import CacheParts
from tsdoc.kernels.triton_plan import Planner
from tsdoc.kernels.triton_selection import SelectedRows, select_chunks, together


class TritonCache:
    """See `DeviceCache`.

    Args:
        parts: Shared with the backend's other caches.
        pieces: Cover the prompt from 0 on without gaps.
        rope: Table for all compact positions, on the device.
        config: Selection settings.
        index: Finds the candidates of decode steps.
    """

    def __init__(
        self,
        parts: CacheParts,
        pieces: Sequence[KVPiece],
        rope: RopeTable,
        config: SelectionConfig,
        index: IndexWatch | None = None,
    ) -> None:
        self._parts = parts
        self._pieces = list(pieces)
        self._rope = rope
        self._config = config
        self._index = index
        self._planner = Planner(config, parts.device, parts.pool.capacity)
        self._attention = ChunkAttention(parts, rope, self._planner)

    def load(self, end: int) -> None:
        """See `DeviceCache.load`; what lies behind `end` is about to be written anew."""
        self._parts.transfer.load(self._pieces, end)
        self._parts.pool.resident = end

    def save(self, start: int, end: int) -> Moving:
        """See `DeviceCache.save`."""
        pool = self._parts.pool
        pool.resident = max(pool.resident, end)
        return self._parts.transfer.save(self._pieces, start, end)

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `DeviceCache.write`."""
        pool = self._parts.pool
        store_kv(pool.keys[layer], pool.values[layer], pool.page_table, start, k, v)

    def selection_queries(self, q: torch.Tensor, ranges: Sequence[ChunkRange]) -> torch.Tensor:
        """See `DeviceCache.selection_queries`."""
        plan = self._planner.any_plan(ranges)
        rotated = self._attention.expect(q, plan)
        return selection_queries(
            q, plan.bounds, self._rope, self._config.n_local, meta=plan.meta, rotated=rotated
        )

    def select(
        self,
        layer: int,
        queries: torch.Tensor,
        ranges: Sequence[ChunkRange],
        allowed: Ranges | None = None,
    ) -> SelectedRows:
        """See `DeviceCache.select`."""
        plan = self._planner.plan(ranges, allowed)
        return select_chunks(self._parts, self._config, layer, queries, plan)

    def attend_chunks(
        self,
        layer: int,
        q: torch.Tensor,
        selected: Sequence[torch.Tensor],
        ranges: Sequence[ChunkRange],
    ) -> torch.Tensor:
        """See `DeviceCache.attend_chunks`."""
        plan = self._planner.plan(ranges, counts=[chosen.shape[1] for chosen in selected])
        return self._attention.attend(layer, q, selected, plan)

    def attend(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> torch.Tensor:
        """See `DeviceCache.attend`."""
        return self.attend_chunks(layer, q, [selected], [around])

    def soft_votes(self, layer: int, q: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """See `DeviceCache.soft_votes`."""
        return soft_votes(self._parts, self._rope, self._config.n_local, layer, q, start, end)

    def attention_mass(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> torch.Tensor:
        """See `DeviceCache.attention_mass`."""
        plan = self._planner.make([around], None, [selected.shape[1]])
        return attention_mass(self._parts, self._rope, layer, q, selected, plan)

    def open_window(self, layer: int, selected: torch.Tensor, around: ChunkRange) -> TritonWindow:
        """See `DeviceCache.open_window`."""
        plan = self._planner.make([around], None, [selected.shape[1]])
        positions = together([selected], selected.device)
        return TritonWindow(self._parts, self._rope, layer, positions, plan)

    def start_decode(
        self, position: int, *, theta: float | None, max_hits: int, allowed: Ranges | None
    ) -> TritonDecode | None:
        """See `DeviceCache.start_decode`; `head_vote` is left to the host."""
        if self._config.function == "head_vote":
            return None
        parts = self._parts
        index = None
        if self._index is not None and self._index.config.applies(self._config, position):
            parts.index.moments = self._index.moments
            parts.index.cover(position)
            index = (parts.index, self._index)
        setup = make_setup(
            parts.pool,
            self._rope,
            self._config,
            parts.compute_dtype,
            parts.num_sms,
            position=position,
            theta=theta,
            max_hits=max_hits,
            is_restricted=allowed is not None,
            ranks=parts.ranks,
            index=index,
        )
        return parts.decodes.start(setup, position, self._planner.prefix(allowed))
