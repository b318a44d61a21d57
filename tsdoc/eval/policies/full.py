"""Full attention, as the model was trained, and with NTK-scaled RoPE beyond the trained window."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tsdoc.engine.forward import Ranges
from tsdoc.eval.policies.attending import Scene
from tsdoc.eval.policies.cache import PolicyCache
from tsdoc.kernels.attention import chunk_attention
from tsdoc.kernels.rope import RopeTable


@dataclass(slots=True, kw_only=True)
class FullAttention:
    """Every token attends to all tokens before it, at their own positions.

    Attributes:
        ntk: Beyond the window, RoPE's theta grows ("NTK-aware" scaling): with s = length / window
            it becomes theta · s^(d / (d - 2)).
    """

    ntk: bool = False
    _rope: RopeTable = field(init=False, repr=False)

    def begin(self, scene: Scene) -> None:
        """See `AttentionPolicy.begin`."""
        self._rope = original_positions(scene, ntk=self.ntk)

    def attend(
        self, layer: int, q: torch.Tensor, cache: PolicyCache, chunks: Ranges
    ) -> torch.Tensor:
        """See `AttentionPolicy.attend`."""
        return attend_all(layer, q, cache, self._rope, chunks[0][0])

    def rewind(self, end: int) -> None:
        """See `AttentionPolicy.rewind`: nothing is remembered."""


def original_positions(scene: Scene, *, ntk: bool) -> RopeTable:
    """The table of original positions; with `ntk`, scaled where they exceed the window."""
    theta = None
    stretch = scene.num_tokens / scene.config.window
    if ntk and stretch > 1:
        dim = scene.config.head_dim
        theta = scene.config.rope.theta * stretch ** (dim / (dim - 2))
    return scene.rope(scene.num_positions, theta=theta)


def attend_all(
    layer: int, q: torch.Tensor, cache: PolicyCache, rope: RopeTable, start: int
) -> torch.Tensor:
    """Full attention of tokens from position `start` on; q and result [num_tokens, heads, dim]."""
    end = start + q.shape[0]
    k = rope.rotate(cache.keys(layer, 0, end), slice(0, end)).to(q.dtype)
    heads = rope.rotate(q.transpose(0, 1), slice(start, end)).to(q.dtype)
    out = chunk_attention(heads, k, cache.values(layer, 0, end), num_before=start)
    return out.transpose(0, 1)
