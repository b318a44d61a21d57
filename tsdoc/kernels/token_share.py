"""Which tokens' K and V a rank of the sequence axis has, and exact sums over all ranks' tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tsdoc.kernels.ranks import Ranks

SHARE_TOKENS = 4096  # consecutive tokens that one rank has


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenShare:
    """Stretches of `unit` tokens go round the ranks.

    Attributes:
        ranks: Those that share the tokens.
        unit: Tokens of one stretch.
    """

    ranks: Ranks
    unit: int = SHARE_TOKENS

    def runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """This rank's stretches of positions [start, end)."""
        size, rank = self.ranks.size, self.ranks.rank
        found = []
        for block in range(start // self.unit, -(-end // self.unit)):
            if block % size == rank:
                found.append((max(start, block * self.unit), min(end, (block + 1) * self.unit)))
        return found

    def mine(self, positions: torch.Tensor) -> torch.Tensor:
        """Which of `positions` are this rank's."""
        return positions // self.unit % self.ranks.size == self.ranks.rank

    def positions(self, start: int, end: int) -> torch.Tensor:
        """This rank's positions of [start, end), ascending."""
        every = torch.arange(start, end)
        return every[self.mine(every)]

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        """Softmax over the last dimension and all ranks, of this rank's scores [..., n]."""
        top, total = log_sum_parts(scores)
        parts = self.ranks.gather(torch.stack((top, total)))
        tops, totals = parts[:, 0], parts[:, 1]
        highest = tops.amax(dim=0)
        whole = (totals * torch.exp(tops - highest)).sum(dim=0)
        return torch.exp(scores - highest.unsqueeze(-1)) / whole.unsqueeze(-1)

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to all ranks' keys from that to each one's; see `merge_parts`."""
        parts = self.ranks.gather(torch.cat((out, lse.unsqueeze(-1)), dim=-1))
        return merge_parts(parts[..., :-1], parts[..., -1])


def log_sum_parts(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest of `scores` [..., n] and the sum of exponentials over it; -inf and 0 of none."""
    if scores.shape[-1] == 0:
        shape = scores.shape[:-1]
        return scores.new_full(shape, -torch.inf), scores.new_zeros(shape)
    top = scores.amax(dim=-1)
    shift = top.masked_fill(torch.isinf(top), 0.0)
    return top, torch.exp(scores - shift.unsqueeze(-1)).sum(dim=-1)


def merge_parts(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins attention of the same queries to several sets of keys, of which one has some.

    Args:
        out: [num_parts, ..., head_dim].
        lse: [num_parts, ...] log-sum-exp; -inf of a part without keys, whose `out` is 0.

    Returns:
        [..., head_dim] and [...].
    """
    top = lse.amax(dim=0)
    shift = top.masked_fill(torch.isinf(top), 0.0)
    weights = torch.exp(lse - shift)
    total = weights.sum(dim=0)
    joined = (out * weights.unsqueeze(-1)).sum(dim=0)
    joined /= total.clamp_min(torch.finfo(total.dtype).tiny).unsqueeze(-1)
    return joined, torch.log(total) + shift
