"""The `torch` backend's cache where every rank has, scores and attends to, some of the tokens.

Softmax statistics of all ranks are merged before the votes; partial attention is merged by its
log-sum-exp. Compact positions are those of the whole selection.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tsdoc.kernels.election import Election
from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.interface import Window
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import (
    ChunkRange,
    SelectionConfig,
    attended_positions,
    token_queries,
)
from tsdoc.kernels.sequence_selection import SequenceSelector
from tsdoc.kernels.sequence_window import Partial, SequenceWindow, attend_rows
from tsdoc.kernels.token_share import TokenShare
from tsdoc.kernels.torch_cache import TorchBackend, TorchCache, by_chunk
from tsdoc.kernels.torch_selection import TorchSelector
from tsdoc.kernels.workers import Workers


class SequenceBackend(TorchBackend):
    """See `Backend`: the CPU; caches of this rank's tokens.

    Args:
        num_kv_heads: Heads of K and V.
        election: Held by all ranks.
        workers: Take the chunks of a block.
        share: This rank's tokens.
    """

    def __init__(
        self, *, num_kv_heads: int, election: Election, workers: Workers | None, share: TokenShare
    ) -> None:
        super().__init__(num_kv_heads=num_kv_heads, election=election, workers=workers)
        self._share = share

    def cache(
        self,
        pieces: Sequence[KVPiece],
        rope: RopeTable,
        config: SelectionConfig,
        index: IndexWatch | None = None,
    ) -> SequenceCache:
        """See `Backend.cache`; every key is scored, whatever `index` there is."""
        return SequenceCache(
            pieces,
            rope,
            config,
            num_kv_heads=self._num_kv_heads,
            election=self._election,
            workers=self._workers,
            share=self._share,
        )


class SequenceCache(TorchCache):
    """See `DeviceCache`: a `TorchCache` of this rank's tokens.

    Args:
        pieces: As for `TorchCache`: memory that all ranks share.
        rope: Table for all compact positions.
        config: Selection settings.
        num_kv_heads: Heads of K and V.
        election: Held by all ranks.
        workers: Take the chunks of a block.
        share: This rank's tokens.
    """

    def __init__(
        self,
        pieces: Sequence[KVPiece],
        rope: RopeTable,
        config: SelectionConfig,
        *,
        num_kv_heads: int,
        election: Election,
        workers: Workers,
        share: TokenShare,
    ) -> None:
        super().__init__(
            pieces,
            rope,
            config,
            num_kv_heads=num_kv_heads,
            election=election,
            workers=workers,
        )
        self._tokens = share
        self._selector: TorchSelector = SequenceSelector(
            self._rows, self._scores, config, election, share
        )

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `DeviceCache.write`: this rank's tokens."""
        for first, last in self._tokens.runs(start, start + k.shape[0]):
            rows = slice(first - start, last - start)
            super().write(layer, first, k[rows], v[rows])

    def soft_votes(self, layer: int, q: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """See `DeviceCache.soft_votes`."""
        queries = token_queries(q, self.rope, self._config.n_local)
        total = torch.zeros(end - start)
        own = self._tokens.positions(start, end) - start
        num_tokens, num_heads, _ = queries.shape
        for part in torch.split(queries, self._selector.batch(num_heads, end - start)):
            shares = self._tokens.softmax(self._selector.score(layer, part, start, end)).sum(dim=1)
            total[own] += self._election.real(shares.flatten(0, 1)).sum(dim=0)
        total = self._tokens.ranks.sum(total)
        return total / (num_tokens * self._election.num_heads(num_heads))

    def attend_chunks(
        self,
        layer: int,
        q: torch.Tensor,
        selected: Sequence[torch.Tensor],
        ranges: Sequence[ChunkRange],
    ) -> torch.Tensor:
        """See `DeviceCache.attend_chunks`; one exchange for all chunks."""
        tasks = by_chunk(partial(self._attend_own, layer), q, selected, ranges)
        parts = self._workers.run(tasks)
        out = torch.cat([out for out, _ in parts], dim=1)
        lse = torch.cat([lse for _, lse in parts], dim=1)
        return self._tokens.merge(out, lse)[0].transpose(0, 1)

    def attend(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> torch.Tensor:
        """See `DeviceCache.attend`."""
        return self.attend_chunks(layer, q, [selected], [around])

    def _attend_own(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> Partial:
        """Attention [num_qo_heads, num_tokens, head_dim] to this rank's rows, and its lse."""
        rows = self._own_rows(layer, selected, around, around.end)
        num_before = selected.shape[1] + around.init_end + around.start - around.local_start
        end = num_before + q.shape[0]
        heads = self.rope.rotate(q.float().transpose(0, 1), slice(num_before, end))
        parts = [
            attend_rows(own_heads, k, v, compact, num_before)
            for own_heads, (k, v, compact) in zip(heads.chunk(len(rows)), rows, strict=True)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def _own_rows(
        self, layer: int, selected: torch.Tensor, around: ChunkRange, end: int
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Per set, rotated K and V [heads, n, head_dim] of this rank's rows, and their places."""
        positions = attended_positions(selected, around, end)
        num_sets = positions.shape[0]
        each = self._num_kv_heads // num_sets
        found = []
        for number, row in enumerate(positions):
            self._rows.check(layer, row)
            mine = self._tokens.mine(row)
            compact = mine.nonzero().squeeze(1)
            k, v = self.gather(layer, row[mine].unsqueeze(0))
            heads = slice(number * each, (number + 1) * each)
            found.append((self.rope.rotate(k[heads], compact), v[heads], compact))
        return found

    def attention_mass(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> torch.Tensor:
        """See `DeviceCache.attention_mass`."""
        _, lse = self._tokens.merge(*self._attend_own(layer, q, selected, around))
        positions = attended_positions(selected, around, around.start)
        num_before = positions.shape[1]
        heads = self.rope.rotate(
            q.float().transpose(0, 1), slice(num_before, num_before + q.shape[0])
        )
        rows = self._own_rows(layer, selected, around, around.start)
        sets = zip(heads.chunk(len(rows)), lse.chunk(len(rows)), rows, positions, strict=True)
        per_head = []
        for own_heads, own_lse, (k, _, compact), row in sets:
            group = own_heads.shape[0] // k.shape[0]
            scores = own_heads @ k.repeat_interleave(group, dim=0).transpose(1, 2)
            shares = torch.exp(scores * q.shape[-1] ** -0.5 - own_lse.unsqueeze(-1)).mean(dim=1)
            placed = torch.zeros(own_heads.shape[0], around.start)
            per_head.append(placed.index_add_(1, row[compact], shares))
        real = self._election.real(torch.cat(per_head))
        mass = real.sum(dim=0) / self._election.num_heads(heads.shape[0])
        return self._tokens.ranks.sum(mass)

    def open_window(self, layer: int, selected: torch.Tensor, around: ChunkRange) -> Window:
        """See `DeviceCache.open_window`."""
        length = selected.shape[1] + around.init_end + around.start - around.local_start
        rows = self._own_rows(layer, selected, around, around.start)
        return SequenceWindow(self, layer, [(k, v) for k, v, _ in rows], length, self._tokens)
