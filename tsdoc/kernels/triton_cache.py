"""The `triton` backend's cache: K and V of one prompt in device pages, read by Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tsdoc.kernels.interface import Ranges
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.page_pool import PAGE_SIZE, PagePool
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import ChunkRange, SelectionConfig, top_indices, votes
from tsdoc.kernels.transfer import Saved, Transfer
from tsdoc.kernels.triton.attention import attend_equal_chunks, attend_rows
from tsdoc.kernels.triton.decode_attention import attend_window
from tsdoc.kernels.triton.gather import gather_rotated
from tsdoc.kernels.triton.query import selection_queries
from tsdoc.kernels.triton.scores import block_votes
from tsdoc.kernels.triton.store import slots_of, store_kv
from tsdoc.kernels.triton.topk import select_top
from tsdoc.kernels.triton_decode import TritonDecode
from tsdoc.kernels.triton_plan import BlockPlan, allowed_prefix, make_plan

VOTE_BYTES = 2 << 30  # votes held at a time
ROW_BYTES = 1 << 30  # gathered K and V held at a time
FUSED_TOKENS = 64  # shorter chunks do not pay for two attention calls


class SelectedRows(Sequence[torch.Tensor]):
    """Per chunk the selected positions [num_sets, num_selected], kept together.

    Attributes:
        positions: [num_chunks, num_sets, top_k] int32; of chunk i the first counts[i] are set.
    """

    def __init__(self, positions: torch.Tensor, counts: Sequence[int]) -> None:
        self.positions = positions
        self.counts = tuple(counts)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]  # no slices
        return self.positions[index, :, : self.counts[index]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheParts:
    """What a cache shares with the other caches of its backend.

    Attributes:
        pool: K and V.
        transfer: Between pool and pieces.
        compute_dtype: Type of queries and of the products.
        num_sms: Multiprocessors of the device.
        copy_back: Whether what is computed goes into the pieces.
    """

    pool: PagePool
    transfer: Transfer
    compute_dtype: torch.dtype
    device: torch.device
    num_sms: int
    copy_back: bool


class TritonWindow:
    """See `Window`: k (rotated) and v, [num_kv_heads, num_rows, head_dim], grown by appending."""

    def __init__(
        self, cache: TritonCache, layer: int, k: torch.Tensor, v: torch.Tensor, length: int
    ) -> None:
        self._cache = cache
        self._layer = layer
        self._k, self._v = k, v
        self._length = length

    def attend(self, q: torch.Tensor, position: int) -> torch.Tensor:
        """See `Window.attend`."""
        if self._length == self._k.shape[1]:
            self._k, self._v = (torch.cat((t, torch.empty_like(t)), 1) for t in (self._k, self._v))
        own = slice(self._length, self._length + 1)
        k, v = self._cache.row(self._layer, position)
        rotated = self._cache.rope.rotate(k.float(), own)
        self._k[:, own] = rotated.to(self._k.dtype)
        self._v[:, own] = v.to(self._v.dtype)
        self._length += 1
        length = torch.tensor([self._length], dtype=torch.int32).to(q.device)
        out = attend_window(q[0].contiguous(), self._k, self._v, length, self._cache.rope)
        return out.unsqueeze(0)


class TritonCache:
    """See `DeviceCache`.

    Args:
        parts: Shared with the backend's other caches.
        pieces: Cover the prompt from 0 on without gaps.
        rope: Table for all compact positions, on the device.
        config: Selection settings.
    """

    def __init__(
        self,
        parts: CacheParts,
        pieces: Sequence[KVPiece],
        rope: RopeTable,
        config: SelectionConfig,
    ) -> None:
        self._parts = parts
        self._pieces = list(pieces)
        self.rope = rope
        self._config = config
        self._plan: BlockPlan | None = None
        self._allowed: tuple[tuple[tuple[int, int], ...], torch.Tensor] | None = None
        self._rotated: tuple[torch.Tensor, tuple[int, ...], torch.Tensor] | None = None

    def load(self, end: int) -> None:
        """See `DeviceCache.load`; what lies behind `end` is about to be written anew."""
        self._parts.transfer.load(self._pieces, end)
        self._parts.pool.resident = end

    def save(self, start: int, end: int) -> Saved:
        """See `DeviceCache.save`."""
        pool = self._parts.pool
        pool.resident = max(pool.resident, end)
        if not self._parts.copy_back:
            return Saved([])
        return self._parts.transfer.save(self._pieces, start, end)

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `DeviceCache.write`."""
        pool = self._parts.pool
        store_kv(pool.keys[layer], pool.values[layer], pool.page_table, start, k, v)

    def row(self, layer: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [num_kv_heads, 1, head_dim] of one position."""
        pool = self._parts.pool
        ((_, _, slot),) = pool.runs(position, position + 1)
        return pool.keys[layer][slot].unsqueeze(1), pool.values[layer][slot].unsqueeze(1)

    def selection_queries(self, q: torch.Tensor, ranges: Sequence[ChunkRange]) -> torch.Tensor:
        """See `DeviceCache.selection_queries`."""
        plan = self._plan
        if plan is None or plan.ranges != tuple(ranges):
            plan = self._planned(ranges, None)
        rotated = None
        if self._is_fused(q, plan):  # attention of the same queries follows
            rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            self._rotated = (q, plan.num_before, rotated)
        return selection_queries(
            q, plan.bounds, self.rope, self._config.n_local, meta=plan.meta, rotated=rotated
        )

    def select(
        self,
        layer: int,
        queries: torch.Tensor,
        ranges: Sequence[ChunkRange],
        allowed: Ranges | None = None,
    ) -> SelectedRows:
        """See `DeviceCache.select`."""
        plan, config, pool = self._planned(ranges, allowed), self._config, self._parts.pool
        num_kv = pool.keys[layer].shape[1]
        num_sets = num_kv if config.sets == "per_kv_head" else 1
        shape = (len(ranges), num_sets, config.top_k)
        if max(plan.counts) == 0:
            empty = torch.empty(shape, dtype=torch.int32, device=queries.device)
            return SelectedRows(empty, plan.counts)
        q = queries.to(self._parts.compute_dtype)
        if config.function == "head_vote":
            return SelectedRows(self._head_vote(layer, q, plan, shape), plan.counts)
        length = max(r.local_start for r in ranges)
        step = max(1, VOTE_BYTES // (4 * num_sets * (length + PAGE_SIZE)))
        chosen = []
        for first in range(0, len(ranges), step):
            part = slice(first, first + step)
            meta, some = plan.meta[part], ranges[part]
            ballots = block_votes(
                q[part],
                pool.keys[layer],
                pool.page_table,
                meta,
                low=some[-1].init_end,
                common_high=min(r.local_start for r in some),
                high=max(r.local_start for r in some),
                per_kv_head=num_sets > 1,
                soft=config.function == "head_soft_vote",
                allowed=plan.allowed,
                num_sms=self._parts.num_sms,
            )
            chosen.append(select_top(ballots, meta, top_k=config.top_k, smoothing=config.smoothing))
        positions = chosen[0] if len(chosen) == 1 else torch.cat(chosen)
        return SelectedRows(positions, plan.counts)

    def _head_vote(
        self, layer: int, q: torch.Tensor, plan: BlockPlan, shape: tuple[int, int, int]
    ) -> torch.Tensor:
        """The rarely used `head_vote` in plain torch on the device: [chunks, sets, top_k]."""
        pool = self._parts.pool
        num_kv = pool.keys[layer].shape[1]
        positions = torch.zeros(shape, dtype=torch.int32, device=q.device)
        for number, (r, count) in enumerate(zip(plan.ranges, plan.counts, strict=True)):
            if count == 0:
                continue
            candidates = torch.arange(r.init_end, r.local_start, device=q.device)
            keys = pool.keys[layer][slots_of(pool.page_table, candidates)].to(q.dtype)
            grouped = q[number].view(num_kv, -1, q.shape[-1]).float() * q.shape[-1] ** -0.5
            logits = torch.einsum("kgd,nkd->kgn", grouped, keys.float()).flatten(0, 1)
            if plan.allowed is not None:
                steps = plan.allowed[r.init_end : r.local_start + 1].diff()
                logits = logits.masked_fill(steps == 0, -torch.inf)
            ballots = votes(logits, self._config, num_selected=count, num_kv_heads=num_kv)
            best = torch.stack([top_indices(row, count) for row in ballots])
            positions[number, :, :count] = (best + r.init_end).int()
        return positions

    def attend_chunks(
        self,
        layer: int,
        q: torch.Tensor,
        selected: Sequence[torch.Tensor],
        ranges: Sequence[ChunkRange],
    ) -> torch.Tensor:
        """See `DeviceCache.attend_chunks`."""
        counts = [chosen.shape[1] for chosen in selected]
        plan = self._planned(ranges, None, counts)
        positions = _together(selected, q.device)
        num_kv, head_dim = self._parts.pool.keys[layer].shape[1:]
        size = 2 * num_kv * plan.num_rows * head_dim * self._parts.compute_dtype.itemsize
        step = max(1, ROW_BYTES // size)
        if len(ranges) <= step:
            return self._attend(layer, q, positions, plan)
        outputs, origin = [], ranges[0].start
        for first in range(0, len(ranges), step):
            part = ranges[first : first + step]
            some = self._make_plan(part, None, counts[first : first + step])
            own = q[part[0].start - origin : part[-1].end - origin]
            outputs.append(self._attend(layer, own, positions[first : first + step], some))
        return torch.cat(outputs)

    def _attend(
        self, layer: int, q: torch.Tensor, positions: torch.Tensor, plan: BlockPlan
    ) -> torch.Tensor:
        k, v = self._gather(layer, positions, plan, plan.ends, plan.num_rows)
        if not self._is_fused(q, plan):
            return attend_rows(q, k, v, plan.meta, plan.bounds, self.rope, longest=plan.longest)
        rotated = None
        if self._rotated is not None:
            whose, num_before, rotated = self._rotated
            self._rotated = None
            if whose is not q or num_before != plan.num_before:
                rotated = None
        return attend_equal_chunks(
            q,
            k,
            v,
            plan.meta,
            plan.bounds,
            self.rope,
            num_before=plan.num_before[0],
            chunk_len=plan.longest,
            rotated=rotated,
        )

    @staticmethod
    def _is_fused(q: torch.Tensor, plan: BlockPlan) -> bool:
        """Whether all chunks' attention to the rows before them is one call of cuDNN's."""
        if not (q.is_cuda and q.itemsize == 2 and plan.is_uniform):
            return False
        if q.shape[2] > 128 or q.shape[2] % 8:  # what cuDNN takes everywhere
            return False
        return plan.longest >= FUSED_TOKENS and plan.num_before[0] > 0

    def attend(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> torch.Tensor:
        """See `DeviceCache.attend`."""
        return self.attend_chunks(layer, q, [selected], [around])

    def open_window(self, layer: int, selected: torch.Tensor, around: ChunkRange) -> TritonWindow:
        """See `DeviceCache.open_window`."""
        plan = self._make_plan([around], None, [selected.shape[1]])
        length = plan.num_before[0]
        positions = _together([selected], selected.device)
        k, v = self._gather(layer, positions, plan, plan.meta[:, 3].contiguous(), length + 128)
        return TritonWindow(self, layer, k[0], v[0], length)

    def _gather(
        self, layer: int, positions: torch.Tensor, plan: BlockPlan, ends: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K, rotated to compact positions, and V: [num_chunks, num_kv_heads, rows, head_dim]."""
        pool, parts = self._parts.pool, self._parts
        num_kv, head_dim = pool.keys[layer].shape[1:]
        shape = (len(plan.ranges), num_kv, rows, head_dim)
        k = torch.empty(shape, dtype=parts.compute_dtype, device=parts.device)
        v = torch.empty_like(k)
        gather_rotated(
            pool.keys[layer],
            pool.values[layer],
            pool.page_table,
            positions,
            plan.meta,
            ends,
            self.rope,
            k,
            v,
        )
        return k, v

    def start_decode(
        self, position: int, *, theta: float | None, max_hits: int, allowed: Ranges | None
    ) -> TritonDecode | None:
        """See `DeviceCache.start_decode`; `head_vote` is left to the host."""
        if self._config.function == "head_vote":
            return None
        prefix = self._prefix(allowed)
        return TritonDecode(
            pool=self._parts.pool,
            rope=self.rope,
            config=self._config,
            compute_dtype=self._parts.compute_dtype,
            device=self._parts.device,
            num_sms=self._parts.num_sms,
            position=position,
            theta=theta,
            max_hits=max_hits,
            allowed=prefix,
        )

    def _planned(
        self,
        ranges: Sequence[ChunkRange],
        allowed: Ranges | None,
        counts: Sequence[int] | None = None,
    ) -> BlockPlan:
        """The plan of a block, made once for all layers."""
        plan = self._plan
        prefix = self._prefix(allowed)
        if (
            plan is None
            or plan.ranges != tuple(ranges)
            or (counts is not None and plan.counts != tuple(counts))
            or (counts is None and plan.allowed is not prefix)
        ):
            plan = self._make_plan(ranges, allowed, counts)
            self._plan = plan
        return plan

    def _make_plan(
        self, ranges: Sequence[ChunkRange], allowed: Ranges | None, counts: Sequence[int] | None
    ) -> BlockPlan:
        return make_plan(
            ranges, self._config, allowed, self._prefix(allowed), self._parts.device, counts
        )

    def _prefix(self, allowed: Ranges | None) -> torch.Tensor | None:
        """Running count of allowed positions on the device, made once."""
        if allowed is None:
            return None
        key = tuple((int(a), int(b)) for a, b in allowed)
        if self._allowed is None or self._allowed[0] != key:
            prefix = allowed_prefix(allowed, self._parts.pool.capacity).to(self._parts.device)
            self._allowed = (key, prefix)
        return self._allowed[1]


def _together(selected: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """[num_chunks, num_sets, longest] int32 of per-chunk selections."""
    if isinstance(selected, SelectedRows):
        return selected.positions
    longest = max(1, max(chosen.shape[1] for chosen in selected))
    shape = (len(selected), selected[0].shape[0], longest)
    out = torch.zeros(shape, dtype=torch.int32, device=device)
    for number, chosen in enumerate(selected):
        out[number, :, : chosen.shape[1]] = chosen.to(device)
    return out
