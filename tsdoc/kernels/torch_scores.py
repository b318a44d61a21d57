"""Scores of queries and cached keys on the CPU: keys are widened to float32 tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tsdoc.kernels.piece_rows import PieceRows
from tsdoc.kernels.workers import Workers

VOTES_BYTES = 128 << 20  # scores held at a time while tokens vote
VOTE_TILE_BYTES = 1 << 20  # of them, that a core works on at a time
TILE_BYTES = 2 << 20  # keys widened to float32 at a time
KEY_UNIT = 64  # BLAS sums a key's product in another order where few keys are left over


class TorchScores:
    """Scores keys of a prompt.

    Args:
        rows: K and V of the prompt.
        workers: Take the tiles.
    """

    def __init__(self, rows: PieceRows, workers: Workers) -> None:
        self._rows = rows
        self._workers = workers
        self._room = torch.empty(0)

    def score(self, layer: int, queries: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Scaled scores [num_kv_heads, num_queries, group, end - start] of keys [start, end).

        They are gone when the next ones are computed: fresh memory for each would cost more than
        the arithmetic on some machines.

        Args:
            layer: Which layer.
            queries: [num_queries, num_qo_heads, head_dim].
            start: First key.
            end: Behind the last key.
        """
        rows = self._by_kv_head(queries)
        shape = (*rows.shape[:2], end - start)
        logits = self._take_room(rows.shape[:2].numel() * (end - start)).view(shape)
        size = _filled(max(1, TILE_BYTES // (4 * rows.shape[0] * rows.shape[2])))
        self._share_out(
            [
                partial(_score_tile, rows, keys, logits[..., at : at + len(keys)])
                for at, keys in self._tiles(layer, start, end, size)
            ]
        )
        return logits.view(rows.shape[0], len(queries), -1, end - start)

    def score_rows(
        self, layer: int, queries: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Scaled scores [num_kv_heads · num_queries · group, n] of keys at `positions`, ascending.

        Args:
            layer: Which layer.
            queries: [num_queries, num_qo_heads, head_dim].
            positions: [n].
        """
        keys = self._rows.gather_keys(layer, positions.unsqueeze(0))
        return torch.bmm(self._by_kv_head(queries), keys.transpose(1, 2)).flatten(0, 1)

    def sum_votes(
        self, layer: int, queries: torch.Tensor, start: int, end: int, weights: torch.Tensor
    ) -> torch.Tensor:
        """Sum over queries and heads of their softmax over keys [start, end), [end - start].

        Args:
            layer: Which layer.
            queries: [num_queries, num_qo_heads, head_dim].
            start: First key.
            end: Behind the last key.
            weights: [num_qo_heads], what each head's part is multiplied by.
        """
        total = torch.zeros(end - start)
        count = max(1, VOTES_BYTES // (4 * queries.shape[1] * max(end - start, 1)))
        for part in torch.split(queries, count):
            self._add_votes(layer, part, start, weights, total)
        return total

    def _add_votes(
        self,
        layer: int,
        queries: torch.Tensor,
        start: int,
        weights: torch.Tensor,
        total: torch.Tensor,
    ) -> None:
        """Adds the votes of some queries for the keys from `start` on to `total`.

        Powers of e are taken of a tile of scores while it is in the cache, relative to its own
        maxima. What that makes of the whole is known once all tiles are there.
        """
        rows = self._by_kv_head(queries)
        num_rows = rows.shape[:2].numel()
        size = _filled(max(1, VOTE_TILE_BYTES // (4 * num_rows)))
        tiles = self._tiles(layer, start, start + len(total), size)
        room = self._take_room(num_rows * len(total))
        powers = [
            room[num_rows * at : num_rows * (at + len(keys))].view(*rows.shape[:2], -1)
            for at, keys in tiles
        ]
        maxima, sums = torch.empty(2, len(tiles), num_rows)
        self._share_out(
            [
                partial(_raise_tile, rows, keys, power, most, own)
                for (_, keys), power, most, own in zip(tiles, powers, maxima, sums, strict=True)
            ]
        )
        scales = torch.exp(maxima - maxima.amax(dim=0))
        shares = weights.view(len(rows), 1, -1).expand(-1, len(queries), -1).flatten()
        scales *= shares / (scales * sums).sum(dim=0)
        self._share_out(
            [
                partial(_add_tile, scale, power, total[at : at + len(keys)])
                for (at, keys), power, scale in zip(tiles, powers, scales, strict=True)
            ]
        )

    def _by_kv_head(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries, scaled, as [num_kv_heads, num_queries · group, head_dim]."""
        num_queries, num_heads, head_dim = queries.shape
        num_kv_heads = self._rows.num_kv_heads
        scale: float = head_dim**-0.5
        grouped = queries.view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
        rows = grouped.transpose(0, 1) * scale
        return rows.reshape(num_kv_heads, -1, head_dim)

    def _take_room(self, size: int) -> torch.Tensor:
        """Memory for `size` numbers, taken from whoever had it before."""
        if self._room.numel() < size:
            self._room = torch.empty(size)
        return self._room[:size]

    def _tiles(self, layer: int, start: int, end: int, size: int) -> list[tuple[int, torch.Tensor]]:
        """Keys [num_keys, num_kv_heads, head_dim] of [start, end) as they are stored, checked.

        Each tile has up to `size` keys, and comes with its distance from `start`.
        """
        tiles = []
        for piece, first, last in self._rows.covering(start, end):
            piece.check_range(layer, first, last)
            keys = self._rows.of(piece, layer)[:, 0]
            for at in range(first, last, size):
                part = keys[at - piece.start : min(at + size, last) - piece.start]
                tiles.append((at - start, part))
        return tiles

    def _share_out(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Runs tasks, as many consecutive ones on each core."""
        each = max(1, -(-len(tasks) // self._workers.num_threads))
        shares = [tasks[at : at + each] for at in range(0, len(tasks), each)]
        with self._workers.leading():
            self._workers.run([partial(_run_all, share) for share in shares])


def _run_all(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        task()


def _score_tile(rows: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
    """Puts `rows` [num_kv_heads, num_rows, head_dim] times `keys` [num_keys, …] into `out`.

    Equal keys get equal scores, wherever they are: their ties go to the lower index.
    """
    num_keys = keys.shape[0]
    if num_keys % KEY_UNIT == 0:
        keys = keys.float().permute(1, 2, 0)
        if out.is_contiguous():
            torch.bmm(rows, keys, out=out)
        else:
            out.copy_(torch.bmm(rows, keys))
        return
    filled = rows.new_empty(_filled(num_keys), *keys.shape[1:])
    filled[:num_keys] = keys
    filled[num_keys:] = 0.0
    out.copy_(torch.bmm(rows, filled.permute(1, 2, 0))[..., :num_keys])


def _filled(num_keys: int) -> int:
    return -(-num_keys // KEY_UNIT) * KEY_UNIT


def _raise_tile(
    rows: torch.Tensor,
    keys: torch.Tensor,
    power: torch.Tensor,
    most: torch.Tensor,
    own: torch.Tensor,
) -> None:
    """Powers of e of scores, as for `_score_tile`, less each row's maximum.

    Args:
        rows: [num_kv_heads, num_rows, head_dim].
        keys: [num_keys, num_kv_heads, head_dim].
        power: Receives them, [num_kv_heads, num_rows, num_keys].
        most: Receives the maxima, [num_kv_heads · num_rows].
        own: Receives the powers' sums, same shape.
    """
    _score_tile(rows, keys, power)
    highest = most.view(*rows.shape[:2], 1)
    torch.amax(power, dim=-1, keepdim=True, out=highest)
    power.sub_(highest).exp_()
    torch.sum(power, dim=-1, out=own.view(rows.shape[:2]))


def _add_tile(scale: torch.Tensor, power: torch.Tensor, out: torch.Tensor) -> None:
    """Adds rows `power` [num_kv_heads, num_rows, num_keys], each times its `scale`, to `out`."""
    out += scale @ power.flatten(0, 1)
