"""What policies that choose whole blocks of tokens have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tsdoc.settings import SelectionSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRange:
    """Which blocks a chunk that begins at `start` may choose from.

        0 … init_end | blocks first … last | local_start … start | the chunk

    Attributes:
        num_chosen: Blocks that fit the budget.
    """

    start: int
    init_end: int
    first: int
    last: int
    local_start: int
    num_chosen: int

    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        return self.last - self.first <= self.num_chosen


def block_range(start: int, budget: SelectionSettings, block_size: int) -> BlockRange:
    """Splits the tokens before `start` at multiples of `block_size`."""
    first = -(-budget.n_init // block_size)
    last = max(first, (start - budget.n_local) // block_size)
    return BlockRange(
        start=start,
        init_end=min(start, first * block_size),
        first=first,
        last=last,
        local_start=min(start, last * block_size),
        num_chosen=budget.top_k // block_size,
    )


def block_positions(chosen: torch.Tensor, block_size: int) -> torch.Tensor:
    """Positions [num_sets, n · block_size] of the blocks `chosen` [num_sets, n], ascending."""
    inside = torch.arange(block_size, device=chosen.device)
    return (chosen.sort(dim=1).values.unsqueeze(2) * block_size + inside).flatten(1)


class BlockSummaries:
    """A tensor per layer whose rows [num_kv_heads, num_blocks, …] grow with the text.

    Args:
        make: Computes rows of blocks [first, last) of a layer.
    """

    def __init__(self, make: Callable[[int, int, int], torch.Tensor]) -> None:
        self._make = make
        self._rows: dict[int, torch.Tensor] = {}

    def up_to(self, layer: int, last: int) -> torch.Tensor:
        """Rows of blocks [0, last)."""
        rows = self._rows.get(layer)
        have = 0 if rows is None else rows.shape[1]
        if have < last:
            new = self._make(layer, have, last)
            rows = new if rows is None else torch.cat((rows, new), dim=1)
            self._rows[layer] = rows
        assert rows is not None  # noqa: S101 - last is positive
        return rows[:, :last]

    def keep(self, num_blocks: int) -> None:
        """Forgets the blocks behind the first `num_blocks`."""
        self._rows = {layer: rows[:, :num_blocks] for layer, rows in self._rows.items()}
