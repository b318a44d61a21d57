"""SelfExtend (ICML 2024, arXiv 2401.01325): far positions are divided by a group size.

A key less than `neighbours` tokens away keeps its relative position; farther ones are attended at
floor positions: query i // G + W - W // G, key j // G.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tsdoc.engine.forward import Ranges
from tsdoc.errors import UsageError
from tsdoc.eval.policies.attending import Scene
from tsdoc.eval.policies.cache import PolicyCache
from tsdoc.kernels.attention import merge_attention, plain_attention
from tsdoc.kernels.rope import RopeTable

ROWS = 256  # queries whose mixed keys are scored at a time


@dataclass(slots=True, kw_only=True)
class SelfExtend:
    """Every token attends to all tokens before it.

    Attributes:
        neighbours: Tokens that keep their relative position (W).
        group: Group size (G); 0 is the least that keeps all positions in the trained window.
    """

    neighbours: int = 1024
    group: int = 0
    _rope: RopeTable = field(init=False, repr=False)
    _group: int = field(default=1, init=False)

    def begin(self, scene: Scene) -> None:
        """See `AttentionPolicy.begin`.

        Raises:
            UsageError: the neighbours alone fill the window.
        """
        room = scene.config.window - self.neighbours
        if room <= 0:
            raise UsageError("neighbours must be fewer than the model's trained window")
        beyond = scene.num_positions - self.neighbours
        self._group = self.group or max(1, -(-beyond // room))
        self._rope = scene.rope(scene.num_positions)

    def attend(
        self, layer: int, q: torch.Tensor, cache: PolicyCache, chunks: Ranges
    ) -> torch.Tensor:
        """See `AttentionPolicy.attend`."""
        start, end = chunks[0][0], chunks[-1][1]
        parts = [
            self._attend(layer, q[first - start : first - start + ROWS], cache, first)
            for first in range(start, end, ROWS)
        ]
        return torch.cat(parts)

    def rewind(self, end: int) -> None:
        """See `AttentionPolicy.rewind`: nothing is remembered."""

    def _attend(self, layer: int, q: torch.Tensor, cache: PolicyCache, start: int) -> torch.Tensor:
        end = start + q.shape[0]
        mixed_start = max(0, start - self.neighbours)
        at = torch.arange(start, end, device=q.device)
        heads = q.transpose(0, 1)
        shift = self.neighbours - self.neighbours // self._group
        grouped_q = self._rope.rotate(heads, at // self._group + shift).to(q.dtype)
        mixed = self._attend_mixed(layer, q, grouped_q, cache, (mixed_start, start, end))
        if mixed_start == 0:
            return mixed[0].transpose(0, 1)
        # Whatever lies before the neighbours of the first query is far for all of them.
        far_at = torch.arange(mixed_start, device=q.device) // self._group
        k = self._rope.rotate(cache.keys(layer, 0, mixed_start), far_at).to(q.dtype)
        far = plain_attention(grouped_q, k, cache.values(layer, 0, mixed_start))
        return merge_attention(mixed, far)[0].transpose(0, 1)

    def _attend_mixed(
        self,
        layer: int,
        q: torch.Tensor,
        grouped_q: torch.Tensor,
        cache: PolicyCache,
        bounds: tuple[int, int, int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [first, end) of queries [start, end): near ones by distance, others by groups."""
        first, start, end = bounds
        at = torch.arange(start, end, device=q.device)
        key_at = torch.arange(first, end, device=q.device)
        keys, values = cache.keys(layer, first, end), cache.values(layer, first, end)
        num_kv = keys.shape[0]
        own_q = self._rope.rotate(q.transpose(0, 1), at).to(q.dtype)
        own_k = self._rope.rotate(keys, key_at).to(q.dtype)
        grouped_k = self._rope.rotate(keys, key_at // self._group).to(q.dtype)
        near = _scores(own_q, own_k)
        distance = at.unsqueeze(1) - key_at
        scores = torch.where(distance < self.neighbours, near, _scores(grouped_q, grouped_k))
        scores = scores.masked_fill(distance < 0, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        share = torch.exp(scores - lse.unsqueeze(-1)).to(q.dtype)
        out = share.view(num_kv, -1, share.shape[-1]) @ values
        return out.view(own_q.shape), lse


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Scaled scores [num_qo_heads, num_tokens, num_keys] float32."""
    num_kv, _, dim = k.shape
    packed = q.reshape(num_kv, -1, dim)
    scores = (packed @ k.transpose(1, 2)).float() * dim**-0.5
    out: torch.Tensor = scores.view(q.shape[0], q.shape[1], -1)
    return out
