"""What the engine asks of a device: keep K and V of a prompt, select, attend.

    load → write → select (scores, votes, top-k) → attend (gather, RoPE, attention) → save

A backend owns the memory its caches live in. Positions are absolute positions in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.memory_plan import MemoryPlan
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import ChunkRange, SelectionConfig

Ranges = Sequence[tuple[int, int]]


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


class Pending(Protocol):
    """A range of positions on its way to the pieces."""

    def wait(self) -> None:
        """Returns once all of it has arrived; raises what writing it raised."""

    def abandon(self) -> None:
        """Returns when nothing is written any more, whether all of it has arrived or not."""


class DeviceDecode(Protocol):
    """The decode steps of one answer with the Selection Cache decided on the device."""

    @property
    def position(self) -> torch.Tensor:
        """Position of the current token, [1] on the device."""

    @property
    def num_lookups(self) -> int:
        """Selections asked for so far, over all layers."""

    @property
    def num_hits(self) -> int:
        """Those that were answered by the last selection."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores K and V of the current token and attends from it: select, or reuse the window.

        Args:
            layer: Which layer.
            q: [1, num_qo_heads, head_dim], before RoPE.
            k: [1, num_kv_heads, head_dim].
            v: Same.

        Returns:
            [1, num_qo_heads, head_dim].
        """

    def run(self, step: Callable[[torch.Tensor], torch.Tensor], token: int) -> torch.Tensor:
        """Runs `step` (ids [1] on the device → logits) for the next token, as a graph if it can."""


class DeviceCache(Protocol):
    """K and V of one prompt on a device, and the operations that read them."""

    def load(self, end: int) -> None:
        """Makes K and V of [0, end) available to the device.

        Raises:
            CorruptPageError: a page does not match its checksum.
        """

    def save(self, start: int, end: int) -> Pending:
        """Begins to bring K and V of [start, end) into the pieces that are on the host."""

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores `k` and `v` [num_tokens, num_kv_heads, head_dim], without RoPE, as kv_dtype."""

    def selection_queries(self, q: torch.Tensor, ranges: Sequence[ChunkRange]) -> torch.Tensor:
        """Selection queries [num_chunks, num_qo_heads, head_dim] float32 of consecutive chunks.

        Args:
            q: [num_tokens, num_qo_heads, head_dim], before RoPE, of all chunks together.
            ranges: One per chunk.
        """

    def select(
        self,
        layer: int,
        queries: torch.Tensor,
        ranges: Sequence[ChunkRange],
        allowed: Ranges | None = None,
    ) -> Sequence[torch.Tensor]:
        """Selects, for several chunks at once, each among its own candidates.

        Args:
            layer: Whose keys.
            queries: Selection queries [num_chunks, num_qo_heads, head_dim] float32.
            ranges: One per chunk.
            allowed: Position ranges that may be selected; None is no restriction.

        Returns:
            Per chunk the selected positions [num_sets, num_selected], ascending.
        """

    def attend_chunks(
        self,
        layer: int,
        q: torch.Tensor,
        selected: Sequence[torch.Tensor],
        ranges: Sequence[ChunkRange],
    ) -> torch.Tensor:
        """`attend` of consecutive chunks together: q and result [num_tokens, heads, head_dim]."""

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

    def soft_votes(self, layer: int, q: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """What single tokens look at among the keys of [start, end), selected or not.

        Every head of every token votes by a softmax over the range, its query rotated as for a
        decode step's selection.

        Args:
            layer: Whose keys.
            q: [num_tokens, num_qo_heads, head_dim], before RoPE.
            start: First position.
            end: Position after the last.

        Returns:
            [end - start] float32, of sum 1: mean over tokens and heads.

        Raises:
            CorruptPageError: a page does not match its checksum.
        """

    def attention_mass(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> torch.Tensor:
        """The share of attention that `attend` with these arguments pays to each position.

        Returns:
            [around.start] float32: mean over the chunk's tokens and heads, 0 for what is not
            attended; with what the chunk pays to itself it would sum to 1.
        """

    def open_window(self, layer: int, selected: torch.Tensor, around: ChunkRange) -> Window:
        """Gathers init, `selected` [num_sets, num_selected] and local before around.start.

        The window ends when another is opened for its layer.
        """

    def start_decode(
        self, position: int, *, theta: float | None, max_hits: int, allowed: Ranges | None
    ) -> DeviceDecode | None:
        """Decode steps from `position` on that need no host; None where the host decides."""


class Backend(Protocol):
    """A device that caches live on.

    Attributes:
        device: Where ids, RoPE tables and weights go.
        save_ahead: Blocks that may be on their way to the pieces, or be kept there, while the next
            one is computed.
    """

    device: torch.device
    save_ahead: int

    def cache(
        self,
        pieces: Sequence[KVPiece],
        rope: RopeTable,
        config: SelectionConfig,
        index: IndexWatch | None = None,
    ) -> DeviceCache:
        """A cache over `pieces`, which cover the prompt without gaps.

        With `index`, selections may find their candidates by it; what a prefill writes must not
        depend on that, so a prefill has none.

        Raises:
            ResourceError: the device cannot hold it.
        """


@runtime_checkable
class Planning(Protocol):
    """A backend whose device has memory of its own, which may be limited."""

    def memory_plan(self, num_tokens: int) -> MemoryPlan | None:
        """What a prompt of so many tokens will need of a limited memory; None without a limit."""
