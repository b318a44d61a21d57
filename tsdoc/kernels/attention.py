"""Attention of one chunk over the tokens before it and, causally, over itself.

`chunk_attention` is what runs; `reference_attention` is the same in a few plain lines for tests.
"""

from __future__ import annotations

import torch


def chunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, num_before: int
) -> torch.Tensor:
    """Attention of a chunk whose keys are the last `num_tokens` of `k`.

    The tokens before need no mask, so they go through the fused kernel packed by KV head; only
    the chunk's own square is causal. The two partial results merge by their log-sum-exp.

    Args:
        q: [num_qo_heads, num_tokens, head_dim], rotated.
        k: [num_kv_heads, num_before + num_tokens, head_dim], rotated.
        v: Same shape.
        num_before: Tokens attended before the chunk.

    Returns:
        [num_qo_heads, num_tokens, head_dim].
    """
    num_qo_heads, num_tokens, head_dim = q.shape
    num_kv_heads = k.shape[0]
    group = num_qo_heads // num_kv_heads
    if num_tokens == 1:
        packed = q.view(num_kv_heads, group, head_dim)
        return _fused(packed, k, v, causal=False)[0].reshape(num_qo_heads, 1, head_dim)
    own, own_lse = _fused(
        q,
        k[:, num_before:].repeat_interleave(group, dim=0),
        v[:, num_before:].repeat_interleave(group, dim=0),
        causal=True,
    )
    if num_before == 0:
        return own
    packed = q.reshape(num_kv_heads, group * num_tokens, head_dim)
    before, before_lse = _fused(packed, k[:, :num_before], v[:, :num_before], causal=False)
    share = torch.sigmoid(before_lse.reshape(num_qo_heads, num_tokens) - own_lse)
    return torch.lerp(own, before.reshape(own.shape), share.unsqueeze(-1))


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's CPU flash attention: output [heads, n, head_dim] and log-sum-exp [heads, n]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), 0.0, causal
    )
    return out.squeeze(0), lse.squeeze(0)


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, num_before: int
) -> torch.Tensor:
    """`chunk_attention` in plain dense arithmetic; same arguments and result."""
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(num_before)
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1) @ v
