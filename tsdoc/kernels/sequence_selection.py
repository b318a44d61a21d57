"""Selections on CPU ranks that share the tokens: each scores its own, and all vote together."""

from __future__ import annotations

import torch

from tsdoc.kernels.election import Election, JointElection, Race
from tsdoc.kernels.piece_rows import PieceRows
from tsdoc.kernels.selection import SelectionConfig, cast_votes
from tsdoc.kernels.token_share import TokenShare
from tsdoc.kernels.torch_scores import TorchScores
from tsdoc.kernels.torch_selection import TorchSelector


class SequenceElection(JointElection):
    """See `Election`: each rank has the scores of some candidates by some heads."""

    def __init__(self, joint: JointElection, share: TokenShare) -> None:
        super().__init__(joint.shard, joint.ranks)
        self._share = share

    def _cast(self, race: Race, count: int, config: SelectionConfig) -> torch.Tensor:
        own = self._share.positions(race.start, race.start + race.num_candidates) - race.start
        scores = self.real(race.scores)
        if race.mask is not None:
            scores = scores.masked_fill(~race.mask[own], -torch.inf)
        num_sets = self._num_sets(config)
        if config.function == "head_vote":
            return self._cast_whole(race, count, config, scores, own)
        if config.function == "topk":
            ballots = scores.masked_fill(torch.isinf(scores), 0.0)
        else:
            ballots = self._share.softmax(scores)
        placed = scores.new_zeros(num_sets, race.num_candidates)
        placed[:, own] = self._add_up(ballots, num_sets)
        return placed

    def _cast_whole(
        self,
        race: Race,
        count: int,
        config: SelectionConfig,
        scores: torch.Tensor,
        own: torch.Tensor,
    ) -> torch.Tensor:
        """`head_vote` ranks the candidates of each head: their scores come together first."""
        whole = scores.new_zeros(scores.shape[0], race.num_candidates)
        whole[:, own] = scores
        self._share.ranks.sum(whole)
        num_sets = self._num_sets(config)
        if self._share.ranks.rank > 0:  # each head votes once
            return torch.zeros(num_sets, race.num_candidates, dtype=torch.float64)
        return cast_votes(
            whole,
            config,
            num_selected=count,
            num_heads=self.shard.num_qo_heads,
            add_up=lambda x: self._add_up(x, num_sets),
        )


class SequenceSelector(TorchSelector):
    """See `TorchSelector`; every key is scored, by the rank that has it.

    Args:
        rows: K and V of the prompt.
        scores: Scores them.
        config: Selection settings.
        election: Held by all ranks.
        share: This rank's tokens.
    """

    def __init__(
        self,
        rows: PieceRows,
        scores: TorchScores,
        config: SelectionConfig,
        election: Election,
        share: TokenShare,
    ) -> None:
        super().__init__(rows, scores, config, election)
        self._tokens = share

    def score(self, layer: int, queries: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Scores of this rank's keys of [start, end) alone; all are checked by who keeps them."""
        for piece, first, last in self._rows.covering(start, end):
            piece.check_range(layer, first, last)
        parts = [
            super(SequenceSelector, self).score(layer, queries, first, last).clone()
            for first, last in self._tokens.runs(start, end)
        ]
        if not parts:
            num_queries, num_heads, _ = queries.shape
            shape = (self._rows.num_kv_heads, num_queries, num_heads // self._rows.num_kv_heads, 0)
            return torch.empty(shape)
        return torch.cat(parts, dim=-1)

    def _num_scored(self, start: int, end: int) -> int:
        """See `TorchSelector`: this rank's keys."""
        return len(self._tokens.positions(start, end))
