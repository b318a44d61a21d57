"""Which keys full attention looks at most, for each token: what a perfect selection would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tsdoc.kernels.host_pool import PAGE_SIZE

SCORE_BYTES = 512 << 20  # scores held at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What may be chosen.

    Attributes:
        first: The first candidate; keys before it share the softmax, but are not chosen.
        ends: One past the last candidate of each set, ascending; at least `count` behind `first`.
        count: Keys that each set takes.
    """

    first: int
    ends: Sequence[int]
    count: int


def most_attended(
    q: torch.Tensor, keys: torch.Tensor, nearer: torch.Tensor, choice: Choice
) -> torch.Tensor:
    """The keys with the largest share of attention, per KV head and set of consecutive tokens.

    A key's mass is its softmax probability, summed over a set's tokens and the query heads of the
    KV head. The softmax of a token is over the keys before its set's end, and `nearer`.

    Args:
        q: Queries [num_tokens, num_qo_heads, head_dim], rotated as they meet these keys; tokens of
            a set follow each other, all sets are of one size.
        keys: [num_slots, num_kv_heads, head_dim], contiguous; on CUDA whole pages of them, of
            which what lies behind the last end may be anything.
        nearer: [num_tokens, num_qo_heads] float32: log-sum-exp of each token's scaled scores with
            keys that are not in `keys` before its end.
        choice: What may be chosen.

    Returns:
        Positions [num_kv_heads, num_sets, count] int64, ascending.
    """
    share = q.shape[0] // len(choice.ends)
    on_device = q.is_cuda
    held = keys.shape[1] if on_device else q.shape[1]
    step = max(1, SCORE_BYTES // (4 * held * share * choice.ends[-1]))
    parts = []
    for first in range(0, len(choice.ends), step):
        some = Choice(
            first=choice.first, ends=choice.ends[first : first + step], count=choice.count
        )
        tokens = slice(first * share, (first + len(some.ends)) * share)
        find = by_kernels if on_device else by_torch
        parts.append(find(q[tokens], keys, nearer[tokens], some))
    return torch.cat(parts, dim=1)


def by_torch(
    q: torch.Tensor, keys: torch.Tensor, nearer: torch.Tensor, choice: Choice
) -> torch.Tensor:
    """`most_attended` in dense float32 arithmetic."""
    num_tokens, num_heads, dim = q.shape
    num_sets, num_kv, last = len(choice.ends), keys.shape[1], choice.ends[-1]
    share = num_tokens // num_sets
    ends = torch.tensor(choice.ends, device=q.device).unsqueeze(1)
    at = torch.arange(last, device=q.device)
    grouped = q.float().transpose(0, 1).reshape(num_kv, -1, dim)
    scores = grouped @ keys[:last].float().permute(1, 2, 0)
    scores = scores.view(num_heads, num_tokens, last).mul_(dim**-0.5)
    scores.masked_fill_(at >= ends.repeat_interleave(share, dim=0), -torch.inf)
    total = torch.logaddexp(scores.logsumexp(dim=-1), nearer.T)
    mass = scores[..., choice.first :].sub_(total.unsqueeze(-1)).exp_()
    summed = mass.view(num_kv, -1, num_sets, share, mass.shape[-1]).sum(dim=(1, 3))
    # What is behind a set's end has no mass: it must lose against candidates without any.
    summed.masked_fill_(at[choice.first :] >= ends, -1.0)
    best = summed.topk(choice.count, dim=2).indices
    return best.sort(dim=2).values + choice.first


def by_kernels(
    q: torch.Tensor, keys: torch.Tensor, nearer: torch.Tensor, choice: Choice
) -> torch.Tensor:
    """`most_attended` by the kernels that score a block's chunks: every token is one."""
    from tsdoc.kernels.triton.scores import block_votes
    from tsdoc.kernels.triton.topk import select_top

    num_sets, (num_slots, num_kv, _) = len(choice.ends), keys.shape
    share = q.shape[0] // num_sets
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 2
    rows = [(choice.first, end, choice.count, 0) for end in choice.ends]
    per_set = torch.tensor(rows, dtype=torch.int32).to(q.device)
    per_token = per_set.repeat_interleave(share, dim=0)
    per_token[:, 0] = 0
    mass = block_votes(
        q.contiguous(),
        keys,
        torch.arange(num_slots // PAGE_SIZE, dtype=torch.int32, device=q.device),
        per_token,
        low=0,
        common_high=choice.ends[0],
        high=choice.ends[-1],
        per_kv_head=True,
        beside=nearer,
        num_sms=num_sms,
    )
    if share > 1:
        mass = mass.view(num_kv, num_sets, share, -1).sum(dim=2)
    return select_top(mass, per_set, top_k=choice.count).transpose(0, 1).long()
