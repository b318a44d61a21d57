"""Attention to one rank's rows, and the window that decode steps grow by them.

What each rank finds is merged by its log-sum-exp; compact positions are those of the whole window.
"""

from __future__ import annotations

import torch

from tsdoc.kernels.attention import plain_attention
from tsdoc.kernels.token_share import TokenShare, merge_parts
from tsdoc.kernels.torch_cache import TorchCache

Partial = tuple[torch.Tensor, torch.Tensor]
"""Attention [num_qo_heads, num_tokens, head_dim] to some rows, and its lse without head_dim."""


class SequenceWindow:
    """See `Window`: this rank's rows, per set of heads."""

    def __init__(
        self,
        cache: TorchCache,
        layer: int,
        rows: list[tuple[torch.Tensor, torch.Tensor]],
        length: int,
        share: TokenShare,
    ) -> None:
        self._cache = cache
        self._layer = layer
        self._rows = rows
        self._length = length
        self._share = share

    def attend(self, q: torch.Tensor, position: int) -> torch.Tensor:
        """See `Window.attend`."""
        rope, at = self._cache.rope, self._length
        self._length += 1
        if bool(self._share.mine(torch.tensor(position))):
            k, v = self._cache.gather(self._layer, torch.tensor([[position]]))
            new = zip(
                self._rows,
                rope.rotate(k, slice(at, at + 1)).chunk(len(self._rows)),
                v.chunk(len(self._rows)),
                strict=True,
            )
            self._rows = [
                (torch.cat((old_k, k), dim=1), torch.cat((old_v, v), dim=1))
                for (old_k, old_v), k, v in new
            ]
        heads = rope.rotate(q.float().transpose(0, 1), slice(at, at + 1))
        parts = [
            attend_rows(own, k, v, torch.zeros(k.shape[1], dtype=torch.int64), 1)
            for own, (k, v) in zip(heads.chunk(len(self._rows)), self._rows, strict=True)
        ]
        out, lse = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
        return self._share.merge(out, lse)[0].transpose(0, 1)


def attend_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, compact: torch.Tensor, num_before: int
) -> Partial:
    """Attention of a chunk to some rows, those of the chunk itself causally, and its lse.

    Args:
        q: [num_qo_heads, num_tokens, head_dim], rotated; token i is at num_before + i.
        k: [num_kv_heads, num_rows, head_dim], rotated.
        v: Same shape.
        compact: [num_rows] compact positions, ascending.
        num_before: Rows before the chunk, of all ranks.
    """
    cut = int((compact < num_before).sum())
    parts = [(torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf))]
    if cut:
        parts.append(plain_attention(q, k[:, :cut].contiguous(), v[:, :cut].contiguous()))
    if cut < k.shape[1]:
        group = q.shape[0] // k.shape[0]
        own_k, own_v = (x[:, cut:].repeat_interleave(group, dim=0) for x in (k, v))
        scores = q @ own_k.transpose(1, 2) * q.shape[-1] ** -0.5
        places = torch.arange(num_before, num_before + q.shape[1]).unsqueeze(1)
        scores = scores.masked_fill(compact[cut:] > places, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        shift = lse.masked_fill(torch.isinf(lse), 0.0).unsqueeze(-1)
        parts.append((torch.exp(scores - shift) @ own_v, lse))
    return merge_parts(
        torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    )
