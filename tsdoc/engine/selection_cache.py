"""The Selection Cache (paper section 4.3): consecutive decode queries often select alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_HITS = 64  # a refresh is forced after this many, since tokens that leave local stay attended


@dataclass(slots=True, kw_only=True)
class _Remembered:
    query: torch.Tensor  # flattened over heads, unit length
    selected: torch.Tensor  # [num_sets, num_selected]
    local_start: int
    num_hits: int = 0


class SelectionCache:
    """Per layer, the query and the indices of the last selection of one answer.

    Args:
        theta: Least cosine between a query and the one that selected; None never reuses.
    """

    def __init__(self, theta: float | None) -> None:
        self._theta = theta
        self._layers: dict[int, _Remembered] = {}
        self.num_lookups = 0
        self.num_hits = 0

    def look_up(self, layer: int, query: torch.Tensor) -> tuple[torch.Tensor, int] | None:
        """Returns (selected, local_start) of the last selection if `query` is close enough to it.

        Args:
            layer: Which layer.
            query: Selection query [num_qo_heads, head_dim] float32; all heads count together.
        """
        self.num_lookups += 1
        last = self._layers.get(layer)
        if self._theta is None or last is None or last.num_hits >= MAX_HITS:
            return None
        if float(last.query @ _unit(query)) < self._theta:
            return None
        last.num_hits += 1
        self.num_hits += 1
        return last.selected, last.local_start

    def remember(
        self, layer: int, query: torch.Tensor, selected: torch.Tensor, local_start: int
    ) -> None:
        """Keeps a fresh selection."""
        self._layers[layer] = _Remembered(
            query=_unit(query), selected=selected, local_start=local_start
        )


def _unit(query: torch.Tensor) -> torch.Tensor:
    flat = query.flatten()
    return flat / flat.norm().clamp_min(torch.finfo(flat.dtype).tiny)
