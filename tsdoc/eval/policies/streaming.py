"""StreamingLLM (ICLR 2024, arXiv 2309.17453): attention sinks and a window of recent tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tsdoc.engine.forward import Ranges
from tsdoc.eval.policies.attending import Scene
from tsdoc.eval.policies.cache import PolicyCache
from tsdoc.eval.policies.compact import attend_rows, join_positions
from tsdoc.kernels.rope import RopeTable
from tsdoc.settings import SelectionSettings

SPARE_POSITIONS = 1024  # a question's chunk may be longer than a prefill's


@dataclass(slots=True, kw_only=True)
class StreamingLLM:
    """The first n_init tokens and the n_local + top_k before a chunk, at positions in the cache.

    The window begins once per chunk instead of once per token, so later tokens of a chunk see
    somewhat more than the published method lets them.
    """

    _rope: RopeTable = field(init=False, repr=False)
    _budget: SelectionSettings = field(init=False, repr=False)

    def begin(self, scene: Scene) -> None:
        """See `AttentionPolicy.begin`."""
        budget = self._budget = scene.budget
        most = budget.n_init + budget.n_local + budget.top_k + scene.budget.chunk_size
        self._rope = scene.rope(most + SPARE_POSITIONS)

    def attend(
        self, layer: int, q: torch.Tensor, cache: PolicyCache, chunks: Ranges
    ) -> torch.Tensor:
        """See `AttentionPolicy.attend`."""
        origin, parts = chunks[0][0], []
        budget = self._budget
        num_kv = cache.keys(layer, 0, 0).shape[0]
        for start, end in chunks:
            init_end = min(budget.n_init, start)
            recent = max(init_end, start - budget.n_local - budget.top_k)
            none = torch.empty(1, 0, dtype=torch.int64, device=q.device)
            before = join_positions(num_kv, init_end, none, recent, start)
            own = q[start - origin : end - origin]
            parts.append(attend_rows(layer, own, cache, self._rope, before, start))
        return torch.cat(parts)

    def rewind(self, end: int) -> None:
        """See `AttentionPolicy.rewind`: nothing is remembered."""
