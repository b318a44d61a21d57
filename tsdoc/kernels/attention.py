"""Attention of one chunk over the tokens before it and, causally, over itself.

`chunk_attention` is what runs; `reference_attention` is the same in a few plain lines for tests.
"""

from __future__ import annotations

import torch


def chunk_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, num_before: int
) -> torch.Tensor:
    """Attention of a chunk whose keys are the last `num_tokens` of `k`.

    Args:
        q: [num_qo_heads, num_tokens, head_dim], rotated.
        k: [num_kv_heads, num_before + num_tokens, head_dim], rotated.
        v: Same shape.
        num_before: Tokens attended before the chunk.

    Returns:
        [num_qo_heads, num_tokens, head_dim].
    """
    return chunk_attention_lse(q, k, v, num_before=num_before)[0]


def chunk_attention_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, num_before: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`chunk_attention` and its log-sum-exp [num_qo_heads, num_tokens].

    The tokens before need no mask, so they go through the fused kernel packed by KV head; only
    the chunk's own square is causal. The two partial results merge by their log-sum-exp.
    """
    num_tokens = q.shape[1]
    group = q.shape[0] // k.shape[0]
    if num_tokens == 1:
        return plain_attention(q, k, v)
    own = _fused(
        q,
        k[:, num_before:].repeat_interleave(group, dim=0),
        v[:, num_before:].repeat_interleave(group, dim=0),
        causal=True,
    )
    if num_before == 0:
        return own
    return merge_attention(own, plain_attention(q, k[:, :num_before], v[:, :num_before]))


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query to every key, without a mask, and its log-sum-exp.

    Args:
        q: [num_qo_heads, num_tokens, head_dim], rotated.
        k: [num_kv_heads, num_keys, head_dim], rotated.
        v: Same shape.

    Returns:
        [num_qo_heads, num_tokens, head_dim] and [num_qo_heads, num_tokens].
    """
    num_kv_heads, _, head_dim = k.shape
    out, lse = _fused(q.reshape(num_kv_heads, -1, head_dim), k, v, causal=False)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


def merge_attention(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins the attention of the same queries to two sets of keys, each with its log-sum-exp."""
    (a_out, a_lse), (b_out, b_lse) = a, b
    share = torch.sigmoid(b_lse - a_lse).unsqueeze(-1)
    out = torch.lerp(a_out.to(share.dtype), b_out.to(share.dtype), share)
    return out.to(a_out.dtype), torch.logaddexp(a_lse, b_lse)


def mass_by_position(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, length: int
) -> torch.Tensor:
    """How much of a chunk's attention goes to each position before it.

    Args:
        q: [num_qo_heads, num_tokens, head_dim], rotated.
        k: [num_kv_heads, num_before + num_tokens, head_dim], rotated; the chunk's own come last.
        positions: Of the rows before the chunk, [num_sets, num_before] below `length`.
        length: Positions to give the mass of.

    Returns:
        [length] float32: mean over tokens and heads; what the chunk pays to itself is missing.
    """
    num_qo_heads, num_tokens, head_dim = q.shape
    num_sets, num_before = positions.shape
    packed = q.float().reshape(k.shape[0], -1, head_dim) * head_dim**-0.5
    scores = torch.bmm(packed, k.float().transpose(1, 2)).view(num_qo_heads, num_tokens, -1)
    mask = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(num_before)
    shares = torch.softmax(scores.masked_fill_(~mask, -torch.inf), dim=-1)[..., :num_before]
    per_set = shares.reshape(num_sets, -1, num_before).mean(dim=1) / num_sets
    mass = torch.zeros(length, device=q.device)
    return mass.index_add_(0, positions.flatten().long(), per_set.flatten())


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's flash attention: output [heads, n, head_dim] and log-sum-exp [heads, n]."""
    batch = (q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))
    if not q.is_cuda:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*batch, 0.0, causal)
    elif q.itemsize == 2:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(*batch, 0.0, causal)[:2]
    else:  # its log-sum-exp is padded to a multiple of 32 queries
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            *batch, None, True, 0.0, causal
        )[:2]
        lse = lse[..., : q.shape[1]]
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
