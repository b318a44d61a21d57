"""Scores of queries and cached keys on the CPU: keys are widened to float32 tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tsdoc.kernels.kv import KEYS
from tsdoc.kernels.piece_rows import PieceRows
from tsdoc.kernels.workers import Workers

VOTERS = 2  # tokens of a question whose scores each worker holds at a time: few stay in its cache
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
        size = queries.shape[:2].numel() * (end - start)
        if self._room.numel() < size:
            self._room = torch.empty(size)
        logits, tasks = self._tiles(layer, queries, start, end, self._room)
        count = min(self._workers.num_threads, len(tasks))
        shares = [partial(_run_all, tasks[at::count]) for at in range(count)]
        with self._workers.leading():
            self._workers.run(shares)
        return logits

    def score_rows(self, layer: int, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scores [num_qo_heads, n] of a scaled query and the keys at `positions` [n], ascending."""
        grouped = query.view(self._rows.num_kv_heads, -1, query.shape[-1])
        keys = self._rows.gather(layer, KEYS, positions.unsqueeze(0))
        return torch.bmm(grouped, keys.transpose(1, 2)).flatten(0, 1)

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
        parts = torch.split(queries, VOTERS)
        count = min(self._workers.num_threads, len(parts))
        tasks = [
            partial(self._sum_parts, layer, parts[at::count], start, end, weights)
            for at in range(count)
        ]
        with self._workers.leading():
            return torch.stack(self._workers.run(tasks)).sum(dim=0)

    def _sum_parts(
        self,
        layer: int,
        parts: Sequence[torch.Tensor],
        start: int,
        end: int,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """`sum_votes` of all `parts`, one after the other."""
        total = torch.zeros(end - start)
        grouped = weights.view(self._rows.num_kv_heads, 1, -1)
        room = torch.empty(parts[0].shape[:2].numel() * (end - start))
        for queries in parts:
            logits, tasks = self._tiles(layer, queries, start, end, room)
            _run_all(tasks)
            logits -= logits.amax(dim=-1, keepdim=True)
            sums = logits.exp_().sum(dim=-1)
            total += (grouped / sums).flatten() @ logits.view(-1, end - start)
        return total

    def _tiles(
        self, layer: int, queries: torch.Tensor, start: int, end: int, room: torch.Tensor
    ) -> tuple[torch.Tensor, list[Callable[[], None]]]:
        """What `score` returns, as a part of `room`, and what fills it."""
        num_queries, num_heads, head_dim = queries.shape
        num_kv_heads = self._rows.num_kv_heads
        grouped = queries.view(num_queries, num_kv_heads, -1, head_dim).transpose(0, 1)
        rows = (grouped * head_dim**-0.5).reshape(num_kv_heads, -1, head_dim)
        logits = room[: rows.shape[:2].numel() * (end - start)]
        logits = logits.view(num_kv_heads, rows.shape[1], end - start)
        size = _filled(max(1, TILE_BYTES // (4 * num_kv_heads * head_dim)))
        tasks: list[Callable[[], None]] = []
        for piece, first, last in self._rows.covering(start, end):
            piece.check_keys(layer, first, last)
            keys, _ = self._rows.of(piece, layer)
            for tile in range(first, last, size):
                stop = min(tile + size, last)
                part = keys[tile - piece.start : stop - piece.start]
                tasks.append(
                    partial(_score_tile, rows, part, logits[..., tile - start : stop - start])
                )
        return logits.view(num_kv_heads, num_queries, num_heads // num_kv_heads, -1), tasks


def _run_all(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        task()


def _score_tile(rows: torch.Tensor, keys: torch.Tensor, out: torch.Tensor) -> None:
    """Puts `rows` [num_kv_heads, num_rows, head_dim] times `keys` [num_keys, …] into `out`.

    Equal keys get equal scores, wherever they are: their ties go to the lower index.
    """
    num_keys = keys.shape[0]
    if num_keys % KEY_UNIT == 0:
        out.copy_(torch.bmm(rows, keys.float().permute(1, 2, 0)))
        return
    filled = rows.new_empty(_filled(num_keys), *keys.shape[1:])
    filled[:num_keys] = keys
    filled[num_keys:] = 0.0
    out.copy_(torch.bmm(rows, filled.permute(1, 2, 0))[..., :num_keys])


def _filled(num_keys: int) -> int:
    return -(-num_keys // KEY_UNIT) * KEY_UNIT
