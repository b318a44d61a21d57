"""Oracle: every query token takes the top_k tokens that full attention looks at most.

What a bounded budget could reach with perfect selection. The mass of a token is its share of the
attention of a KV head's query heads, over everything before the query. Scores use the original
positions while these fit the trained window; beyond it, every key outside the local window counts
as if it stood at that window's edge. Attention itself is at compact positions, as TokenSelect's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tsdoc.engine.forward import Ranges
from tsdoc.eval.policies.attending import Scene
from tsdoc.eval.policies.cache import PolicyCache
from tsdoc.eval.policies.full import attend_all
from tsdoc.kernels.most_attended import Choice, most_attended
from tsdoc.kernels.rope import RopeTable
from tsdoc.settings import SelectionSettings

MOST_TOKENS = 512  # tokens that select together
GATHERED_TOKENS = 128  # tokens whose rows are gathered together


@dataclass(slots=True, kw_only=True)
class Oracle:
    """The first n_init tokens, the top_k of most attention, and n_local before; sets per KV head.

    Attributes:
        share: Consecutive tokens of the prefill that share a set, by the sum of their attention.
    """

    share: int = 1
    _rope: RopeTable = field(init=False, repr=False)
    _budget: SelectionSettings = field(init=False, repr=False)
    _in_window: bool = field(default=True, init=False)

    def begin(self, scene: Scene) -> None:
        """See `AttentionPolicy.begin`."""
        budget = self._budget = scene.budget
        self._in_window = scene.num_tokens <= scene.config.window
        bounded = budget.n_init + budget.top_k + 2 * budget.n_local + 2 * MOST_TOKENS + self.share
        self._rope = scene.rope(
            max(bounded, scene.num_positions) if self._in_window else bounded + self.share
        )

    def attend(
        self, layer: int, q: torch.Tensor, cache: PolicyCache, chunks: Ranges
    ) -> torch.Tensor:
        """See `AttentionPolicy.attend`."""
        start, end = chunks[0][0], chunks[-1][1]
        budget = self._budget
        share = self.share if cache.sealed is None else 1
        # Sets that begin while everything fits the budget leave nothing out.
        fits = budget.n_init + budget.top_k + budget.n_local
        whole = min(end, max(start, fits // share * share + share))
        parts = []
        if whole > start:
            parts.append(attend_all(layer, q[: whole - start], cache, self._rope, start))
        while whole < end:
            count = min(max(share, MOST_TOKENS // share * share), end - whole)
            width = min(share, count)
            count -= count % width
            own = q[whole - start : whole - start + count]
            chosen = self._select(layer, own, cache, whole, width)
            sets = max(1, GATHERED_TOKENS // width)
            for first in range(0, chosen.shape[1], sets):
                some = chosen[:, first : first + sets]
                tokens = slice(first * width, (first + some.shape[1]) * width)
                parts.append(self._attend(layer, own[tokens], cache, whole + tokens.start, some))
            whole += count
        return torch.cat(parts)

    def rewind(self, end: int) -> None:
        """See `AttentionPolicy.rewind`: nothing is remembered."""

    def _attend(
        self, layer: int, q: torch.Tensor, cache: PolicyCache, first: int, chosen: torch.Tensor
    ) -> torch.Tensor:
        """Attention of q [num_tokens, …] from position `first` on to its sets `chosen`."""
        num_tokens, num_heads, dim = q.shape
        num_kv, num_sets, _ = chosen.shape
        share = num_tokens // num_sets
        begins = torch.arange(first, first + num_tokens, share, device=q.device)
        init = torch.arange(self._budget.n_init, device=q.device)
        local = begins.unsqueeze(1) + torch.arange(-self._budget.n_local, share, device=q.device)
        shape = (num_kv, num_sets, -1)
        positions = torch.cat((init.expand(shape), chosen, local.expand(shape)), dim=2)
        k, v = cache.gather(layer, positions.flatten(1))
        k, v = (x.view(num_kv * num_sets, -1, dim) for x in (k, v))
        num_rows = k.shape[1]
        k = self._rope.rotate(k, slice(0, num_rows)).to(q.dtype)
        heads = q.view(num_sets, share, num_heads, dim).transpose(1, 2)
        heads = self._rope.rotate(heads, slice(num_rows - share, num_rows)).to(q.dtype)
        # [kv · sets, group · share, dim]
        packed = heads.reshape(num_sets, num_kv, -1, dim).transpose(0, 1).flatten(0, 1)
        scores = (packed @ k.transpose(1, 2)).float() * dim**-0.5
        group = num_heads // num_kv
        later = torch.ones(share, share, dtype=torch.bool, device=q.device).triu(1)
        scores.view(-1, group, share, num_rows)[..., num_rows - share :].masked_fill_(
            later, -torch.inf
        )
        out = torch.softmax(scores, dim=-1).to(q.dtype) @ v
        out = out.view(num_kv, num_sets, group, share, dim).permute(1, 3, 0, 2, 4)
        return out.reshape(num_tokens, num_heads, dim)

    def _select(
        self, layer: int, q: torch.Tensor, cache: PolicyCache, first: int, share: int
    ) -> torch.Tensor:
        """Positions [num_kv_heads, num_sets, top_k], ascending, of most attention."""
        budget, n_local = self._budget, self._budget.n_local
        num_tokens, end = q.shape[0], first + q.shape[0]
        at = torch.arange(first, end, device=q.device)
        begins = (at - first) // share * share + first
        heads = q.float().transpose(0, 1)
        near_k = cache.keys(layer, first - n_local, end).float()
        near_k = self._rope.rotate(near_k, slice(0, n_local + num_tokens))
        near_q = self._rope.rotate(heads, slice(n_local, n_local + num_tokens))
        near_at = torch.arange(first - n_local, end, device=q.device)
        inside = (near_at >= (begins - n_local).unsqueeze(1)) & (near_at <= at.unsqueeze(1))
        nearer = _masked_scores(near_q, near_k, inside).logsumexp(dim=-1).T
        choice = Choice(
            first=budget.n_init,
            ends=range(first - n_local, end - n_local, share),
            count=budget.top_k,
        )
        keys = cache.slots(layer)
        if self._in_window:
            keys, far_end = torch.empty_like(keys, dtype=q.dtype), choice.ends[-1]
            turned = self._rope.rotate(cache.keys(layer, 0, far_end).float(), slice(0, far_end))
            keys[:far_end] = turned.transpose(0, 1)
            far_q = self._rope.rotate(heads, at)
        else:
            far_q = self._rope.rotate(heads, n_local + at - begins)
        return most_attended(far_q.transpose(0, 1).to(q.dtype), keys, nearer, choice)


def _masked_scores(q: torch.Tensor, k: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Scaled scores [num_qo_heads, num_tokens, num_keys]; -inf where not `inside`."""
    num_kv, num_keys, dim = k.shape
    scores = q.reshape(num_kv, -1, dim) @ k.transpose(1, 2)
    scores = scores.view(q.shape[0], q.shape[1], num_keys).mul_(dim**-0.5)
    return scores.masked_fill_(~inside, -torch.inf)
