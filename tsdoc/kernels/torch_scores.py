"""Scores of queries and cached keys on the CPU: keys are widened to float32 tile by tile.

Rows are widened whole, V as well: to step over V every few hundred bytes of a mapped file takes
longer than to read all of it in order. What they go to is used again, since fresh memory would cost
as much as filling it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tsdoc.kernels.piece_rows import PieceRows
from tsdoc.kernels.workers import Workers

VOTES_BYTES = 128 << 20  # scores held at a time while tokens vote
VOTE_TILE_BYTES = 1 << 20  # of them, that a core works on at a time
TILE_BYTES = 4 << 20  # rows widened to float32 at a time
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
        self._wide = [torch.empty(0)] * workers.num_threads

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
        tiles = self._tiles(layer, start, end, _tile_rows(rows))

        def work(number: int, wide: torch.Tensor) -> None:
            at, tile = tiles[number]
            _score_tile(rows, tile, wide, logits[..., at : at + len(tile)])

        self._share_out(len(tiles), rows, work)
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
        size = min(_filled(max(1, VOTE_TILE_BYTES // (4 * num_rows))), _tile_rows(rows))
        tiles = self._tiles(layer, start, start + len(total), size)
        room = self._take_room(num_rows * len(total))
        powers = [
            room[num_rows * at : num_rows * (at + len(tile))].view(*rows.shape[:2], -1)
            for at, tile in tiles
        ]
        maxima, sums = torch.empty(2, len(tiles), num_rows)

        def raise_tile(number: int, wide: torch.Tensor) -> None:
            tile, power = tiles[number][1], powers[number]
            _score_tile(rows, tile, wide, power)
            _raise(power, maxima[number], sums[number])

        self._share_out(len(tiles), rows, raise_tile)
        scales = torch.exp(maxima - maxima.amax(dim=0))
        shares = weights.view(len(rows), 1, -1).expand(-1, len(queries), -1).flatten()
        scales *= shares / (scales * sums).sum(dim=0)

        def add_tile(number: int, wide: torch.Tensor) -> None:
            at, tile = tiles[number]
            total[at : at + len(tile)] += scales[number] @ powers[number].flatten(0, 1)

        self._share_out(len(tiles), rows, add_tile)

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
        """Rows [num_keys, 2, num_kv_heads, head_dim] of [start, end) as they are stored, checked.

        Each tile has up to `size` rows, and comes with its distance from `start`.
        """
        tiles = []
        for piece, first, last in self._rows.covering(start, end):
            piece.check_range(layer, first, last)
            rows = self._rows.of(piece, layer)
            for at in range(first, last, size):
                part = rows[at - piece.start : min(at + size, last) - piece.start]
                tiles.append((at - start, part))
        return tiles

    def _share_out(
        self, count: int, rows: torch.Tensor, work: Callable[[int, torch.Tensor], None]
    ) -> None:
        """Does `work` for numbers below `count`, as many consecutive ones on each core.

        Each core has memory for a tile, `rows` being what it is multiplied with.
        """
        size = _tile_rows(rows) * 2 * rows.shape[0] * rows.shape[2]
        for core in range(min(count, self._workers.num_threads)):
            if self._wide[core].numel() < size:
                self._wide[core] = torch.empty(size)
        self._workers.share_out(count, work, self._wide)


def _score_tile(
    queries: torch.Tensor, tile: torch.Tensor, wide: torch.Tensor, out: torch.Tensor
) -> None:
    """Puts `queries` [num_kv_heads, num_rows, head_dim] times the keys of `tile` into `out`.

    Equal keys get equal scores, wherever they are: their ties go to the lower index.

    Args:
        queries: Scaled.
        tile: [num_keys, 2, num_kv_heads, head_dim], as it is stored.
        wide: Memory for as many rows, rounded up, in float32.
        out: [num_kv_heads, num_rows, num_keys].
    """
    num_keys = len(tile)
    if tile.dtype != torch.float32 or num_keys != _filled(num_keys):
        stored = tile
        tile = wide[: _filled(num_keys) * stored[0].numel()].view(-1, *stored.shape[1:])
        tile[:num_keys] = stored
        tile[num_keys:] = 0.0
    keys = tile[:, 0].permute(1, 2, 0)
    if len(tile) == num_keys and out.is_contiguous():
        torch.bmm(queries, keys, out=out)
    else:
        out.copy_(torch.bmm(queries, keys)[..., :num_keys])


def _tile_rows(queries: torch.Tensor) -> int:
    """Rows that are widened at a time, for `queries` [num_kv_heads, num_rows, head_dim]."""
    return _filled(max(1, TILE_BYTES // (4 * 2 * queries.shape[0] * queries.shape[2])))


def _filled(num_keys: int) -> int:
    return -(-num_keys // KEY_UNIT) * KEY_UNIT


def _raise(power: torch.Tensor, most: torch.Tensor, own: torch.Tensor) -> None:
    """Makes of scores powers of e, less each row's maximum.

    Args:
        power: [num_kv_heads, num_rows, num_keys], in place.
        most: Receives the maxima, [num_kv_heads · num_rows].
        own: Receives the powers' sums, same shape.
    """
    highest = most.view(*power.shape[:2], 1)
    torch.amax(power, dim=-1, keepdim=True, out=highest)
    power.sub_(highest).exp_()
    torch.sum(power, dim=-1, out=own.view(power.shape[:2]))
