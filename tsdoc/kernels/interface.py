"""What the engine asks of a device: keep K and V of a prompt, select, attend.

    write ──► select (scores → votes → top-k) ──► attend (gather → RoPE → attention)

A backend owns the memory its pieces live in. Positions are absolute positions in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tsdoc.kernels.selection import ChunkRange


class Window(Protocol):
    """The rows one decode selection attends to in one layer, gathered and rotated once.

    Tokens generated while the selection is reused are appended at the next compact positions:
    those that leave the local window stay, so no row ever moves.
    """

    def attend(self, q: torch.Tensor, position: int) -> torch.Tensor:
        """Appends the token at `position` and attends from it.

        Args:
            q: [1, num_qo_heads, head_dim], before RoPE.
            position: The token after the window's last; its K and V have been written.

        Returns:
            [1, num_qo_heads, head_dim].
        """


class DeviceCache(Protocol):
    """K and V of one prompt on a device, and the operations that read them."""

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores `k` and `v` [num_tokens, num_kv_heads, head_dim], without RoPE, as kv_dtype."""

    def select(
        self,
        layer: int,
        queries: torch.Tensor,
        ranges: Sequence[ChunkRange],
        allowed: Sequence[tuple[int, int]] | None = None,
    ) -> list[torch.Tensor]:
        """Selects, for several chunks at once, each among its own candidates.

        Args:
            layer: Whose keys.
            queries: Selection queries [num_chunks, num_qo_heads, head_dim] float32.
            ranges: One per chunk.
            allowed: Position ranges that may be selected; None is no restriction.

        Returns:
            Per chunk the selected positions [num_sets, num_selected], ascending.
        """

    def attend(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> torch.Tensor:
        """Attention of chunk [around.start, around.end), whose K and V have been written.

        Args:
            layer: Whose keys and values.
            q: [num_tokens, num_qo_heads, head_dim], before RoPE.
            selected: Positions [num_sets, num_selected], ascending, in the candidates' range.
            around: What else is attended. Compact positions count init, selected, local and the
                chunk itself in this order.

        Returns:
            [num_tokens, num_qo_heads, head_dim].
        """

    def open_window(self, layer: int, selected: torch.Tensor, around: ChunkRange) -> Window:
        """Gathers init, `selected` [num_sets, num_selected] and local before around.start."""
