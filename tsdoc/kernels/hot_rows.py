"""Device memory for what a decode step reads of K and V that lie in host memory."""

from __future__ import annotations

import torch

from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.triton.hot_rows import (
    KEYS_FOUND,
    KEYS_WANTED,
    STATE_SIZE,
    VALUES_FOUND,
    VALUES_WANTED,
    HotLayer,
    keep_recent,
)


class HotRows:
    """Rows of all layers on the device, for one answer after the other.

    Args:
        pool: K and V, in host memory.
        config: Selection settings.
        num_candidates: How many the key index is asked for; an eighth more are kept.
    """

    def __init__(
        self,
        pool: PagePool,
        config: SelectionConfig,
        num_candidates: int,
    ) -> None:
        self._pool, self._config = pool, config
        device, dtype = pool.page_table.device, pool.keys[0].dtype
        num_layers, row = len(pool.keys), pool.keys[0].shape[1:]
        num_kept = num_candidates + num_candidates // 8

        def rows(*shape: int) -> torch.Tensor:
            return torch.empty(num_layers, *shape, *row, dtype=dtype, device=device)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        recent_k, recent_v = rows(2, config.n_init + config.n_local + 1).unbind(1)
        keys, values = rows(2, num_kept), rows(2, config.top_k)
        candidates = zeros(num_layers, 2, num_kept)
        selected = zeros(num_layers, 2, config.top_k)
        places = zeros(config.top_k)
        self._state = zeros(num_layers, STATE_SIZE)
        self.layers = [
            HotLayer(
                recent_k=recent_k[layer],
                recent_v=recent_v[layer],
                keys=keys[layer],
                values=values[layer],
                candidates=candidates[layer],
                selected=selected[layer],
                places=places,
                state=self._state[layer],
            )
            for layer in range(num_layers)
        ]

    def begin(self, position: int) -> None:
        """Forgets the last answer; the first token of the next one is at `position`."""
        pool, config = self._pool, self._config
        self._state.zero_()
        for keys, values, hot in zip(pool.keys, pool.values, self.layers, strict=True):
            keep_recent(
                keys, values, pool.page_table, hot, position, n_init=config.n_init,
                n_local=config.n_local,
            )  # fmt: skip

    def counts(self) -> dict[str, int]:
        """Rows of all layers since `begin`: keys and values that were wanted, and found here."""
        columns = {
            "keys_wanted": KEYS_WANTED, "keys_found": KEYS_FOUND,
            "values_wanted": VALUES_WANTED, "values_found": VALUES_FOUND,
        }  # fmt: skip
        sums = self._state.sum(0).tolist()
        return {name: sums[column] for name, column in columns.items()}
