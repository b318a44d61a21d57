"""Attention over chosen rows at compact positions, as TokenSelect does it."""

from __future__ import annotations

import torch

from tsdoc.eval.policies.cache import PolicyCache
from tsdoc.kernels.attention import chunk_attention
from tsdoc.kernels.rope import RopeTable


def attend_rows(
    layer: int,
    q: torch.Tensor,
    cache: PolicyCache,
    rope: RopeTable,
    before: torch.Tensor,
    start: int,
) -> torch.Tensor:
    """Attention of a chunk to the rows `before` it and, causally, to itself.

    Args:
        layer: Whose keys and values.
        q: [num_tokens, num_qo_heads, head_dim] of the chunk, before RoPE.
        cache: Holds everything up to the chunk's end.
        rope: Table for as many positions as there are rows.
        before: Positions [num_kv_heads, num_before], ascending; they get 0, 1, ….
        start: The chunk's first position.

    Returns:
        [num_tokens, num_qo_heads, head_dim].
    """
    num_tokens, num_before = q.shape[0], before.shape[1]
    own = torch.arange(start, start + num_tokens, device=q.device)
    positions = torch.cat((before, own.expand(before.shape[0], -1)), dim=1)
    k, v = cache.gather(layer, positions)
    end = num_before + num_tokens
    k = rope.rotate(k, slice(0, end)).to(q.dtype)
    heads = rope.rotate(q.transpose(0, 1), slice(num_before, end)).to(q.dtype)
    return chunk_attention(heads, k, v, num_before=num_before).transpose(0, 1)


def join_positions(
    num_kv_heads: int, init_end: int, chosen: torch.Tensor, local_start: int, start: int
) -> torch.Tensor:
    """[num_kv_heads, n]: [0, init_end), `chosen` [num_sets, m], and [local_start, start)."""
    device = chosen.device
    init = torch.arange(init_end, device=device).expand(num_kv_heads, -1)
    local = torch.arange(local_start, start, device=device).expand(num_kv_heads, -1)
    return torch.cat((init, chosen.expand(num_kv_heads, -1), local), dim=1)
