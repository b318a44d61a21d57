"""Ranks without shared memory: rank 0 gets what each computes, and gives what was there before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.test_sharded_cache import BASE, DIM, ROPE
from tests.thread_ranks import run_ranks
from tsdoc.kernels import spread_cache
from tsdoc.kernels.kv import KVPiece, MemoryPiece
from tsdoc.kernels.ranks import Mesh
from tsdoc.kernels.shards import HeadShard, shard_heads
from tsdoc.kernels.spread_cache import SpreadBackend

LAYERS = 2
EDGES = ((0, 100), (100, 220))


def make_pieces(num_kv_heads: int, kv_dtype: str) -> list[MemoryPiece]:
    return [
        MemoryPiece(
            start=start,
            capacity=end - start,
            num_layers=LAYERS,
            num_kv_heads=num_kv_heads,
            head_dim=DIM,
            kv_dtype=kv_dtype,
        )
        for start, end in EDGES
    ]


def make_backend(shard: HeadShard, mesh: Mesh, kv_dtype: str) -> SpreadBackend:
    return SpreadBackend(
        shard, mesh, num_layers=LAYERS, head_dim=DIM, kv_dtype=kv_dtype, share_tokens=16
    )


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(9, 3), (14, 2)])
@pytest.mark.parametrize(("tensor", "sequence"), [(2, 1), (4, 1), (1, 3), (2, 2)])
def test_every_bit_comes_and_goes(
    tensor: int,
    sequence: int,
    heads: tuple[int, int],
    kv_dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spread_cache, "SENT_TOKENS", 64)
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(LAYERS, EDGES[-1][1], 2, heads[1], DIM, generator=generator)
    kv[:, 7] = -0.0
    kv[:, 9] = torch.inf
    whole = make_pieces(heads[1], kv_dtype)
    expected = make_pieces(heads[1], kv_dtype)
    for piece in expected:
        rows = kv[:, piece.start : piece.start + piece.capacity]
        if kv_dtype == "bfloat16":
            rows = rows.bfloat16().view(torch.uint16)
        for layer in range(LAYERS):
            piece.rows(layer)[:] = rows[layer].numpy()

    def work(mesh: Mesh) -> tuple[HeadShard, list[KVPiece]]:
        shard = shard_heads(*heads, mesh.tensor.rank, mesh.tensor.size)
        backend, own = make_backend(shard, mesh, kv_dtype), slice(*shard.kv)

        def pieces() -> list[KVPiece]:
            if mesh.world.rank == 0:
                return [*whole]
            return [backend.own_piece(start, end - start) for start, end in EDGES]

        cache = backend.cache(pieces(), ROPE, BASE)
        for layer in range(LAYERS):
            cache.write(layer, 0, kv[layer, :, 0, own], kv[layer, :, 1, own])
        cache.save(0, 130)
        cache.save(130, EDGES[-1][1]).wait()
        fresh = pieces()
        backend.cache(fresh, ROPE, BASE).load(EDGES[-1][1])
        return shard, fresh

    for rank, (shard, found) in enumerate(run_ranks(tensor, sequence, work)):
        own = slice(*shard.kv) if rank else slice(None)
        for piece, right in zip(found, expected, strict=True):
            for layer in range(LAYERS):
                rows, wanted = piece.rows(layer), right.rows(layer)[:, :, own]
                bits = np.uint32 if kv_dtype == "float32" else np.uint16
                np.testing.assert_array_equal(
                    np.ascontiguousarray(rows).view(bits), np.ascontiguousarray(wanted).view(bits)
                )
