"""Quest-style pages (ICML 2024, arXiv 2406.10774): an upper bound of each page's scores chooses.

For a page with elementwise minimum m and maximum M of its keys, no key of it scores more than the
sum over dimensions of max(q·m, q·M). Quest chooses for each decode query and head after a full
prefill; here pages are chosen for each chunk as well (by its mean query, one set per KV head), at
compact positions, so that the method can be used beyond the window.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tsdoc.engine.forward import Ranges
from tsdoc.eval.policies.attending import Scene
from tsdoc.eval.policies.blocks import BlockRange, BlockSummaries, block_positions, block_range
from tsdoc.eval.policies.cache import PolicyCache
from tsdoc.eval.policies.compact import attend_rows, join_positions
from tsdoc.eval.policies.full import attend_all
from tsdoc.eval.policies.streaming import SPARE_POSITIONS
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import selection_query
from tsdoc.settings import SelectionSettings


@dataclass(slots=True, kw_only=True)
class QuestPages:
    """The first n_init tokens, the best pages with top_k tokens together, and n_local before.

    Attributes:
        page_size: Tokens of a page.
    """

    page_size: int = 16
    _rope: RopeTable = field(init=False, repr=False)
    _budget: SelectionSettings = field(init=False, repr=False)
    _bounds: BlockSummaries | None = field(default=None, init=False, repr=False)

    def begin(self, scene: Scene) -> None:
        """See `AttentionPolicy.begin`."""
        budget = self._budget = scene.budget
        most = budget.n_init + budget.n_local + budget.top_k + 2 * self.page_size
        self._rope = scene.rope(most + budget.chunk_size + SPARE_POSITIONS)
        self._bounds = None

    def attend(
        self, layer: int, q: torch.Tensor, cache: PolicyCache, chunks: Ranges
    ) -> torch.Tensor:
        """See `AttentionPolicy.attend`."""
        if self._bounds is None:
            self._bounds = BlockSummaries(
                lambda layer, first, last: self._summarize(layer, first, last, cache)
            )
        origin = chunks[0][0]
        parts = [
            self._attend(layer, q[start - origin : end - origin], cache, start)
            for start, end in chunks
        ]
        return torch.cat(parts)

    def rewind(self, end: int) -> None:
        """See `AttentionPolicy.rewind`."""
        if self._bounds is not None:
            self._bounds.keep(end // self.page_size)

    def _attend(self, layer: int, q: torch.Tensor, cache: PolicyCache, start: int) -> torch.Tensor:
        pages = block_range(start, self._budget, self.page_size)
        if pages.whole:
            return attend_all(layer, q, cache, self._rope, start)
        scores = self._score(layer, q, pages)
        chosen = pages.first + scores.topk(pages.num_chosen, dim=1).indices
        before = join_positions(
            scores.shape[0],
            pages.init_end,
            block_positions(chosen, self.page_size),
            pages.local_start,
            start,
        )
        return attend_rows(layer, q, cache, self._rope, before, start)

    def _score(self, layer: int, q: torch.Tensor, pages: BlockRange) -> torch.Tensor:
        """Upper bounds [num_kv_heads, num_pages], summed over the heads of a group."""
        assert self._bounds is not None  # noqa: S101 - set before
        low, high = self._bounds.up_to(layer, pages.last)[:, pages.first :].unbind(2)
        query = selection_query(q, self._rope, self._budget.n_local)
        grouped = query.view(low.shape[0], -1, query.shape[-1])
        # max(q·m, q·M) is q·M for positive q and q·m for negative.
        best = grouped.clamp_min(0) @ high.transpose(1, 2)
        best += grouped.clamp_max(0) @ low.transpose(1, 2)
        return best.sum(dim=1)

    def _summarize(self, layer: int, first: int, last: int, cache: PolicyCache) -> torch.Tensor:
        """Minimum and maximum [num_kv_heads, num_pages, 2, head_dim] of whole pages."""
        size = self.page_size
        keys = cache.keys(layer, first * size, last * size).float()
        paged = keys.view(keys.shape[0], last - first, size, keys.shape[2])
        return torch.stack((paged.amin(dim=2), paged.amax(dim=2)), dim=2)
