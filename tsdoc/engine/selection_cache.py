"""The Selection Cache (paper section 4.3): consecutive decode queries often select alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tsdoc.kernels.interface import Window
from tsdoc.kernels.ranks import SOLO, Mesh

TINY = 1e-30  # of a query of zeros
MAX_HITS = 64  # a refresh is forced after this many, since tokens that leave local stay attended


@dataclass(slots=True, kw_only=True)
class _Remembered:
    query: torch.Tensor  # flattened over this rank's heads
    window: Window
    whole: bool
    num_hits: int = 0


class SelectionCache:
    """Per layer, the query and the window of the last selection of one answer.

    Args:
        theta: Least cosine between a query and the one that selected; None never reuses.
        mesh: Ranks whose heads count together and which decide alike.
    """

    def __init__(self, theta: float | None, mesh: Mesh = SOLO) -> None:
        self.theta = theta
        self._mesh = mesh
        self._layers: dict[int, _Remembered] = {}
        self.num_lookups = 0
        self.num_hits = 0

    def look_up(self, layer: int, query: torch.Tensor, *, whole: bool) -> Window | None:
        """Returns the window of the last selection if `query` is close enough to it.

        Args:
            layer: Which layer.
            query: Selection query [num_qo_heads, head_dim] float32; all heads count together.
            whole: Every token before this one fits the budget: there is nothing to select, and a
                window that was whole as well holds them all.
        """
        last = self._layers.get(layer)
        if whole and last is not None and last.whole:
            return last.window
        self.num_lookups += 1
        if self.theta is None or last is None or last.num_hits >= MAX_HITS:
            return None
        if self._cosine(last.query, query.flatten()) < self.theta:
            return None
        last.num_hits += 1
        self.num_hits += 1
        return last.window

    def remember(self, layer: int, query: torch.Tensor, window: Window, *, whole: bool) -> None:
        """Keeps a fresh selection."""
        self._layers[layer] = _Remembered(query=query.flatten(), window=window, whole=whole)

    def _cosine(self, before: torch.Tensor, now: torch.Tensor) -> float:
        """Between two queries over all heads of all ranks: the same number on every rank."""
        own = torch.stack((before @ now, before @ before, now @ now)).double()
        # The first ranks' numbers are everyone's; those behind them have the same heads.
        parts = self._mesh.world.gather(own)[: self._mesh.tensor.size]
        product, norm, other = parts.sum(dim=0).tolist()
        return float(product / max((norm * other) ** 0.5, TINY))
