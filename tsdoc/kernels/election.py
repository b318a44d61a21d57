"""From scores to selected positions: votes of the heads that are here, or of all ranks' heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from tsdoc.kernels.ranks import Ranks
from tsdoc.kernels.selection import (
    SelectionConfig,
    cast_votes,
    settle_votes,
    sum_over_heads,
    top_indices,
    votes,
)
from tsdoc.kernels.shards import HeadShard
from tsdoc.kernels.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Race:
    """The candidates of one chunk.

    Attributes:
        scores: [num_qo_heads, num_candidates] float32, scaled; where ranks share the tokens, of
            this rank's candidates alone.
        start: Position of the first candidate.
        mask: [num_candidates] bool, which may be selected; None is all.
        num_candidates: Of all ranks.
    """

    scores: torch.Tensor
    start: int
    mask: torch.Tensor | None
    num_candidates: int

    def count(self, top_k: int) -> int:
        """How many are selected."""
        most = self.num_candidates if self.mask is None else int(self.mask.sum())
        return min(top_k, most)

    def masked_scores(self) -> torch.Tensor:
        """Scores with -inf for what may not be selected."""
        if self.mask is None:
            return self.scores
        return self.scores.masked_fill(~self.mask, -torch.inf)


class Election(Protocol):
    """How scores become selections."""

    def hold(self, races: Sequence[Race], config: SelectionConfig) -> list[torch.Tensor]:
        """Returns, per race, positions [num_sets, num_selected], ascending."""

    def real(self, scores: torch.Tensor) -> torch.Tensor:
        """Leaves the heads [num_heads, …] that have a say."""

    def num_heads(self, padded: int) -> int:
        """How many of `padded` heads have a say."""

    def planned_heads(self, padded: int) -> int:
        """Heads to plan memory for: the same number on every rank, so that all do as much."""


class OwnElection:
    """See `Election`: all heads are here.

    Args:
        num_kv_heads: Heads of K and V.
        workers: Take a race each.
    """

    def __init__(self, num_kv_heads: int, workers: Workers) -> None:
        self._num_kv_heads = num_kv_heads
        self._workers = workers

    def hold(self, races: Sequence[Race], config: SelectionConfig) -> list[torch.Tensor]:
        """See `Election.hold`."""
        return self._workers.run([partial(self._hold, race, config) for race in races])

    def _hold(self, race: Race, config: SelectionConfig) -> torch.Tensor:
        num_sets = self._num_kv_heads if config.sets == "per_kv_head" else 1
        count = race.count(config.top_k)
        if count == 0:
            return torch.empty(num_sets, 0, dtype=torch.int64)
        ballots = votes(
            race.masked_scores(),
            config,
            num_selected=count,
            num_kv_heads=self._num_kv_heads,
            all_allowed=race.mask is None,
        )
        return torch.stack([top_indices(row, count) for row in ballots]) + race.start

    def real(self, scores: torch.Tensor) -> torch.Tensor:
        """See `Election.real`."""
        return scores

    def num_heads(self, padded: int) -> int:
        """See `Election.num_heads`."""
        return padded

    def planned_heads(self, padded: int) -> int:
        """See `Election.planned_heads`."""
        return padded


class JointElection:
    """See `Election`: every rank has some of the heads, and rank 0 decides for all.

    Votes are added up over all ranks before the top-k, each query head's once; rank 0's indices
    are every rank's, so that rounding can never make ranks disagree.

    Args:
        shard: The heads of this rank.
        ranks: Those that vote together.
    """

    def __init__(self, shard: HeadShard, ranks: Ranks) -> None:
        self.shard = shard
        self.ranks = ranks

    def hold(self, races: Sequence[Race], config: SelectionConfig) -> list[torch.Tensor]:
        """See `Election.hold`; one sum and one message for all races together."""
        counts = [race.count(config.top_k) for race in races]
        running = [(race, count) for race, count in zip(races, counts, strict=True) if count]
        num_sets = self._num_sets(config)
        chosen = torch.empty(num_sets * sum(counts), dtype=torch.int64)
        if running:
            self._decide(running, config, chosen)
        own = slice(*self.shard.kv) if num_sets > 1 else slice(None)
        parts = torch.split(chosen, [num_sets * count for count in counts])
        return [part.view(num_sets, count)[own] for part, count in zip(parts, counts, strict=True)]

    def _decide(
        self,
        running: Sequence[tuple[Race, int]],
        config: SelectionConfig,
        chosen: torch.Tensor,
    ) -> None:
        """Fills `chosen` with the positions of one race after the other."""
        cast = [self._cast(race, count, config) for race, count in running]
        joint = torch.cat([ballots.flatten() for ballots in cast])
        self.ranks.sum_at_first(joint)
        if self.ranks.rank == 0:
            sums = torch.split(joint, [ballots.numel() for ballots in cast])
            settled = [
                _settle(total.view(ballots.shape), race, count, config.smoothing).flatten()
                for total, ballots, (race, count) in zip(sums, cast, running, strict=True)
            ]
            torch.cat(settled, out=chosen)
        self.ranks.from_first(chosen)

    def _num_sets(self, config: SelectionConfig) -> int:
        shard = self.shard
        return shard.num_qo_heads // shard.group if config.sets == "per_kv_head" else 1

    def _cast(self, race: Race, count: int, config: SelectionConfig) -> torch.Tensor:
        """Votes [num_sets of the model, num_candidates] of this rank's heads."""
        return cast_votes(
            self.real(race.masked_scores()),
            config,
            num_selected=count,
            num_heads=self.shard.num_qo_heads,
            add_up=lambda x: self._add_up(x, self._num_sets(config)),
        )

    def _add_up(self, x: torch.Tensor, num_sets: int) -> torch.Tensor:
        if num_sets == 1:
            return sum_over_heads(x, 1)
        sets = torch.tensor([kv + self.shard.kv[0] for kv in self.shard.kv_of_head])
        return x.new_zeros(num_sets, x.shape[1]).index_add_(0, sets, x)

    def real(self, scores: torch.Tensor) -> torch.Tensor:
        """See `Election.real`."""
        return self.shard.real(scores, 0)

    def num_heads(self, padded: int) -> int:
        """See `Election.num_heads`."""
        return self.shard.num_heads

    def planned_heads(self, padded: int) -> int:
        """See `Election.planned_heads`: more than any rank has."""
        return self.shard.num_qo_heads


def _settle(total: torch.Tensor, race: Race, count: int, smoothing: int) -> torch.Tensor:
    decided = settle_votes(total, race.mask, smoothing)
    return torch.stack([top_indices(row, count) for row in decided]) + race.start
