"""SnapKV-style eviction (NeurIPS 2024, arXiv 2404.14469).

The prompt is prefilled with full attention, question included. Then the last queries of the prompt
(the observation window) vote, per KV head, for the tokens to keep: their attention, pooled over
neighbours, decides. The answer attends to those and to what comes after. Beyond the trained window
full attention needs NTK-scaled RoPE, which is used there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from tsdoc.engine.forward import Ranges
from tsdoc.eval.policies.attending import Scene
from tsdoc.eval.policies.cache import PolicyCache
from tsdoc.eval.policies.full import attend_all, original_positions
from tsdoc.kernels.attention import chunk_attention
from tsdoc.kernels.rope import RopeTable, rotate
from tsdoc.settings import SelectionSettings


@dataclass(slots=True, kw_only=True)
class SnapKV:
    """Keeps n_init + n_local + top_k tokens for the answer.

    Attributes:
        observed: Queries of the observation window.
        pool: Odd width of the pooling.
    """

    observed: int = 32
    pool: int = 5
    _rope: RopeTable = field(init=False, repr=False)
    _budget: SelectionSettings = field(init=False, repr=False)
    _kept: dict[int, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _prompt_end: int = field(default=0, init=False)

    def begin(self, scene: Scene) -> None:
        """See `AttentionPolicy.begin`."""
        self._rope = original_positions(scene, ntk=True)
        self._budget = scene.budget
        self._kept = {}

    def attend(
        self, layer: int, q: torch.Tensor, cache: PolicyCache, chunks: Ranges
    ) -> torch.Tensor:
        """See `AttentionPolicy.attend`."""
        start, end = chunks[0][0], chunks[-1][1]
        if cache.sealed is not None and q.shape[0] == 1 and layer in self._kept:
            return self._attend_kept(layer, q, cache, start)
        if cache.sealed is not None:
            self._kept[layer] = self._vote(layer, q, cache, end)
            self._prompt_end = end
        return attend_all(layer, q, cache, self._rope, start)

    def rewind(self, end: int) -> None:
        """See `AttentionPolicy.rewind`: every question votes anew."""
        self._kept = {}

    def _vote(self, layer: int, q: torch.Tensor, cache: PolicyCache, end: int) -> torch.Tensor:
        """Positions to keep [num_kv_heads, n], ascending, of those before `end`."""
        observed = min(self.observed, q.shape[0])
        first = end - observed
        k = self._rope.rotate(cache.keys(layer, 0, end).float(), slice(0, end))
        heads = q[-observed:].float().transpose(0, 1)
        heads = self._rope.rotate(heads, slice(first, end))
        num_kv = k.shape[0]
        grouped = heads.reshape(num_kv, -1, q.shape[2])
        scores = (grouped @ k.transpose(1, 2)) * q.shape[2] ** -0.5
        scores = scores.view(num_kv, -1, observed, end)
        own = torch.ones(observed, observed, dtype=torch.bool, device=q.device).triu(1)
        scores[..., first:].masked_fill_(own, -torch.inf)
        mass = torch.softmax(scores, dim=-1)[..., :first].sum(dim=(1, 2))
        pooled = F.max_pool1d(mass, self.pool, stride=1, padding=self.pool // 2)
        budget = self._budget.n_init + self._budget.n_local + self._budget.top_k
        count = min(first, max(budget - observed, 0))
        # Pooling makes neighbours equal; ties go to the lower index on every device.
        best = pooled.sort(dim=1, descending=True, stable=True).indices[:, :count]
        kept = best.sort(dim=1).values
        window = torch.arange(first, end, device=q.device).expand(num_kv, -1)
        return torch.cat((kept, window), dim=1)

    def _attend_kept(
        self, layer: int, q: torch.Tensor, cache: PolicyCache, position: int
    ) -> torch.Tensor:
        kept = self._kept[layer]
        since = torch.arange(self._prompt_end, position + 1, device=q.device)
        positions = torch.cat((kept, since.expand(kept.shape[0], -1)), dim=1)
        k, v = cache.gather(layer, positions)
        cos, sin = self._rope.cos[positions], self._rope.sin[positions]
        heads = self._rope.rotate(q.transpose(0, 1), slice(position, position + 1)).to(q.dtype)
        k = rotate(k, cos, sin).to(q.dtype)
        return chunk_attention(heads, k, v, num_before=positions.shape[1] - 1).transpose(0, 1)
