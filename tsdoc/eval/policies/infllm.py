"""InfLLM-style blocks (NeurIPS 2024, arXiv 2402.04617).

The text is cut into blocks of 128 tokens. A block is represented by the 4 keys that the queries of
the local window after them score highest on average; a chunk takes the blocks whose representatives
match its queries best, over all heads and without positions. Everything outside the local window is
attended as if it stood at the window's edge.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tsdoc.engine.forward import Ranges
from tsdoc.eval.policies.attending import Scene
from tsdoc.eval.policies.blocks import BlockRange, BlockSummaries, block_positions, block_range
from tsdoc.eval.policies.cache import PolicyCache
from tsdoc.eval.policies.compact import join_positions
from tsdoc.eval.policies.full import attend_all
from tsdoc.eval.policies.streaming import SPARE_POSITIONS
from tsdoc.kernels.attention import chunk_attention_lse, merge_attention, plain_attention
from tsdoc.kernels.rope import RopeTable
from tsdoc.settings import SelectionSettings


@dataclass(slots=True, kw_only=True)
class InfLLM:
    """The first n_init tokens, the best blocks with top_k tokens together, and n_local before.

    Attributes:
        block_size: Tokens of a block.
        num_representatives: Keys that stand for a block.
    """

    block_size: int = 128
    num_representatives: int = 4
    _rope: RopeTable = field(init=False, repr=False)
    _budget: SelectionSettings = field(init=False, repr=False)
    _scores: dict[int, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _representatives: BlockSummaries | None = field(default=None, init=False, repr=False)
    _num_positions: int = field(default=0, init=False)

    def begin(self, scene: Scene) -> None:
        """See `AttentionPolicy.begin`."""
        budget = self._budget = scene.budget
        edge = budget.n_init + budget.n_local + self.block_size
        self._rope = scene.rope(edge + budget.chunk_size + SPARE_POSITIONS)
        self._num_positions = scene.num_positions
        self._scores = {}
        self._representatives = None

    def attend(
        self, layer: int, q: torch.Tensor, cache: PolicyCache, chunks: Ranges
    ) -> torch.Tensor:
        """See `AttentionPolicy.attend`."""
        if self._representatives is None:
            self._representatives = BlockSummaries(
                lambda layer, first, last: self._represent(layer, first, last, cache)
            )
        origin, parts = chunks[0][0], []
        for start, end in chunks:
            own = q[start - origin : end - origin]
            if cache.sealed is None:
                self._judge(layer, own, cache, start)
            parts.append(self._attend(layer, own, cache, start))
        return torch.cat(parts)

    def rewind(self, end: int) -> None:
        """See `AttentionPolicy.rewind`: a block is represented once it has left the window."""
        if self._representatives is not None:
            self._representatives.keep(max(0, end - self._budget.n_local) // self.block_size)

    def _judge(self, layer: int, q: torch.Tensor, cache: PolicyCache, start: int) -> None:
        """Adds each key's score by the queries up to n_local tokens after it."""
        end, first = start + q.shape[0], max(0, start - self._budget.n_local)
        k = cache.keys(layer, first, end).float()
        num_kv, num_keys, _ = k.shape
        k = self._rope.rotate(k, slice(0, num_keys))
        heads = self._rope.rotate(q.float().transpose(0, 1), slice(start - first, num_keys))
        # Queries of a group add up before the product is needed: only sums over bands are.
        grouped = heads.view(num_kv, -1, q.shape[0], q.shape[2]).sum(dim=1)
        scores = grouped @ k.transpose(1, 2)
        at = torch.arange(start, end, device=q.device).unsqueeze(1)
        key_at = torch.arange(first, end, device=q.device)
        inside = (key_at < at) & (key_at >= at - self._budget.n_local)
        if layer not in self._scores:
            self._scores[layer] = torch.zeros(num_kv, self._num_positions, device=q.device)
        self._scores[layer][:, first:end] += (scores * inside).sum(dim=1)

    def _represent(self, layer: int, first: int, last: int, cache: PolicyCache) -> torch.Tensor:
        """Sum of a block's representative keys [num_kv_heads, num_blocks, head_dim]."""
        size = self.block_size
        rows = slice(first * size, last * size)
        scores = self._scores[layer][:, rows].reshape(-1, last - first, size)
        best = scores.topk(min(self.num_representatives, size), dim=2).indices
        keys = cache.keys(layer, first * size, last * size).float()
        blocks = keys.reshape(keys.shape[0], last - first, size, -1)
        chosen = blocks.gather(2, best.unsqueeze(3).expand(-1, -1, -1, blocks.shape[3]))
        return chosen.sum(dim=2)

    def _attend(self, layer: int, q: torch.Tensor, cache: PolicyCache, start: int) -> torch.Tensor:
        budget, end = self._budget, start + q.shape[0]
        if start <= budget.n_init + budget.n_local:
            return attend_all(layer, q, cache, self._rope, start)
        blocks = block_range(start, budget, self.block_size)
        local_start, num_tokens = blocks.local_start, q.shape[0]
        edge = start - local_start
        k = self._rope.rotate(cache.keys(layer, local_start, end), slice(0, edge + num_tokens))
        heads = q.transpose(0, 1)
        near_q = self._rope.rotate(heads, slice(edge, edge + num_tokens)).to(q.dtype)
        v = cache.values(layer, local_start, end)
        near = chunk_attention_lse(near_q, k.to(q.dtype), v, num_before=edge)
        before = join_positions(
            k.shape[0], blocks.init_end, self._choose(layer, q, blocks), start, start
        )
        far_k, far_v = cache.gather(layer, before)
        at_edge = torch.full((num_tokens,), budget.n_local, device=q.device)
        far_q = self._rope.rotate(heads, at_edge).to(q.dtype)
        far = plain_attention(far_q, far_k, far_v)
        return merge_attention(near, far)[0].transpose(0, 1)

    def _choose(self, layer: int, q: torch.Tensor, blocks: BlockRange) -> torch.Tensor:
        """Positions [1, n] of the blocks that match the chunk's queries."""
        if blocks.first == blocks.last:
            return torch.empty(1, 0, dtype=torch.int64, device=q.device)
        assert self._representatives is not None  # noqa: S101 - set before
        keys = self._representatives.up_to(layer, blocks.last)[:, blocks.first :]
        query = q.float().mean(dim=0).view(keys.shape[0], -1, q.shape[2]).sum(dim=1)
        scores = torch.einsum("kd,kbd->b", query, keys)
        count = min(blocks.num_chosen, scores.shape[0])
        chosen = blocks.first + scores.topk(count).indices
        return block_positions(chosen.unsqueeze(0), self.block_size)
