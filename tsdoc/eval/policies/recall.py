"""How much of full attention's mass TokenSelect's selection covers, query by query."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tsdoc.engine.forward import Ranges
from tsdoc.eval.policies.attending import Scene
from tsdoc.eval.policies.cache import PolicyCache
from tsdoc.eval.policies.full import attend_all
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import (
    SelectionConfig,
    chunk_range,
    selection_query,
    top_indices,
    votes,
)


@dataclass(slots=True, kw_only=True)
class Recall:
    """Full attention that looks, at every single token, what a selection would have covered."""

    _rope: RopeTable = field(init=False, repr=False)
    _config: SelectionConfig = field(init=False, repr=False)
    _covered: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False)

    def begin(self, scene: Scene) -> None:
        """See `AttentionPolicy.begin`."""
        self._rope = scene.rope(scene.num_positions)
        self._config = SelectionConfig(**scene.budget.model_dump())

    def attend(
        self, layer: int, q: torch.Tensor, cache: PolicyCache, chunks: Ranges
    ) -> torch.Tensor:
        """See `AttentionPolicy.attend`."""
        start = chunks[0][0]
        if cache.sealed is not None and q.shape[0] == 1:
            self._covered.setdefault(layer, []).append(self._look(layer, q, cache, start))
        return attend_all(layer, q, cache, self._rope, start)

    def rewind(self, end: int) -> None:
        """See `AttentionPolicy.rewind`: nothing is remembered."""

    def by_layer(self) -> tuple[float, ...]:
        """Mean over tokens and heads, for each layer."""
        return tuple(sum(row) / len(row) for _, row in sorted(self._covered.items()))

    def _look(self, layer: int, q: torch.Tensor, cache: PolicyCache, position: int) -> float:
        keys = cache.keys(layer, 0, position + 1).float()
        num_kv, end, dim = keys.shape
        heads = self._rope.rotate(q.float().transpose(0, 1), slice(position, end))
        grouped = heads.view(num_kv, -1, dim)
        turned = self._rope.rotate(keys, slice(0, end))
        mass = torch.softmax(grouped @ turned.transpose(1, 2) * dim**-0.5, dim=-1)
        around = chunk_range(position, end, self._config)
        if around.num_candidates <= self._config.top_k:
            return 1.0
        query = selection_query(q, self._rope, self._config.n_local).view(num_kv, -1, dim)
        candidates = keys[:, around.init_end : around.local_start]
        logits = (query @ candidates.transpose(1, 2) * dim**-0.5).flatten(0, 1)
        top_k = self._config.top_k
        ballots = votes(logits, self._config, num_selected=top_k, num_kv_heads=num_kv)
        left_out = torch.ones(num_kv, around.num_candidates, dtype=torch.bool, device=q.device)
        for number, row in enumerate(ballots):
            sets = num_kv // ballots.shape[0]
            chosen = top_indices(row, top_k)
            left_out[number * sets : (number + 1) * sets, chosen] = False
        missed = mass[..., around.init_end : around.local_start] * left_out.unsqueeze(1)
        return 1.0 - float(missed.sum(dim=-1).mean())
