"""Ranks equal one from identical inputs: votes, indices, attention, whatever the split.

A vote may differ by 1e-5 of itself (of what is added up, where terms of both signs are), so an
index where votes differ by less from the last that wins.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass

import pytest
import torch

from tests.engine.test_small_budget import VARIANTS
from tests.thread_ranks import run_ranks
from tsdoc.kernels import election
from tsdoc.kernels.election import Race
from tsdoc.kernels.interface import DeviceCache
from tsdoc.kernels.kv import MemoryPiece
from tsdoc.kernels.ranks import Mesh
from tsdoc.kernels.rope import make_rope_table
from tsdoc.kernels.selection import SelectionConfig, cast_votes, chunk_range
from tsdoc.kernels.sharded_cache import ShardedBackend
from tsdoc.kernels.shards import HeadShard, shard_heads
from tsdoc.kernels.torch_cache import TorchCache
from tsdoc.models.config import RopeConfig

DIM, NUM_TOKENS = 16, 300
ROPE = make_rope_table(RopeConfig(rope_type="default", theta=1e4), DIM, 600)
BASE = SelectionConfig(n_init=4, n_local=12, top_k=30, chunk_size=8)
HEADS = {"6/2": (6, 2), "9/3": (9, 3), "14/2": (14, 2), "5/5": (5, 5), "6/1": (6, 1)}
MESHES = [(2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (2, 3), (5, 1)]
STARTS = (40, 120, 200, 280)
LIMIT = 1e-5  # relative, of votes


@dataclass
class Inputs:
    """K, V, one selection query per chunk, and the queries of the chunks; float32."""

    k: torch.Tensor
    v: torch.Tensor
    queries: torch.Tensor
    q: torch.Tensor


@dataclass
class Found:
    """What one rank, or one process that has everything, says; heads are its own."""

    selected: list[torch.Tensor]
    shares: torch.Tensor
    attention: torch.Tensor


def make_inputs(num_qo_heads: int, num_kv_heads: int) -> Inputs:
    generator = torch.Generator().manual_seed(num_qo_heads)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, DIM, generator=generator)

    return Inputs(
        k=draw(NUM_TOKENS, num_kv_heads),
        v=draw(NUM_TOKENS, num_kv_heads),
        queries=2 * draw(len(STARTS), num_qo_heads),
        q=draw(8 * len(STARTS), num_qo_heads),
    )


def make_pieces(num_kv_heads: int) -> list[MemoryPiece]:
    sizes = {0: 100, 100: NUM_TOKENS - 100}
    return [
        MemoryPiece(
            start=start,
            capacity=size,
            num_layers=1,
            num_kv_heads=num_kv_heads,
            head_dim=DIM,
            kv_dtype="float32",
        )
        for start, size in sizes.items()
    ]


def use(
    cache: DeviceCache,
    inputs: Inputs,
    config: SelectionConfig,
    shard: HeadShard,
    forced: list[torch.Tensor] | None = None,
) -> Found:
    """Writes, selects and attends with the heads of `shard`; to `forced` where it is given."""
    kv, heads = slice(*shard.kv), slice(shard.first, shard.last)
    cache.write(0, 0, inputs.k[:, kv], inputs.v[:, kv])
    ranges = [chunk_range(start, start + 8, config) for start in STARTS]
    selected = list(cache.select(0, inputs.queries[:, heads], ranges))
    sets = kv if config.sets == "per_kv_head" else slice(None)
    attended = selected if forced is None else [indices[sets] for indices in forced]
    chunks = zip(inputs.q[:, heads].split(8), attended, ranges, strict=True)
    return Found(
        selected=selected,
        shares=cache.soft_votes(0, inputs.q[-8:, heads], 4, 280),
        attention=torch.cat([cache.attend(0, q, indices, r) for q, indices, r in chunks]),
    )


@dataclass
class Votes:
    """The sum of all heads' votes [num_sets, num_candidates], and what it may differ by."""

    total: torch.Tensor
    near: torch.Tensor


def expected_votes(inputs: Inputs, at: int, config: SelectionConfig) -> Votes:
    """The votes of a chunk, as one process casts them."""
    around = chunk_range(STARTS[at], STARTS[at] + 8, config)
    num_kv_heads, num_heads = inputs.k.shape[1], inputs.q.shape[1]
    keys = inputs.k[around.init_end : around.local_start]
    keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
    logits = torch.einsum("nhd,hd->hn", keys, inputs.queries[at]) / DIM**0.5
    num_sets = num_kv_heads if config.sets == "per_kv_head" else 1

    def add_up(x: torch.Tensor) -> torch.Tensor:
        return x.view(num_sets, -1, x.shape[-1]).sum(dim=1)

    total = cast_votes(
        logits, config, num_selected=config.top_k, num_heads=num_heads, add_up=add_up
    )
    sizes = add_up(logits.abs()) if config.function == "topk" else total
    return Votes(total=total, near=LIMIT * sizes)


def check_indices(selected: torch.Tensor, votes: Votes, number: int, first: int) -> None:
    """`selected` [n] have the n largest votes of set `number`, up to what rounding decides."""
    total, near = votes.total[number], votes.near[number]
    last, at = total.topk(len(selected))
    chosen = torch.zeros_like(total, dtype=torch.bool)
    chosen[selected - first] = True
    assert int(chosen.sum()) == len(selected)
    assert (total[chosen] >= last[-1] - near[at[-1]]).all()
    assert (total[~chosen] <= last[-1] + near[at[-1]]).all()


def compare(
    num_qo_heads: int, num_kv_heads: int, config: SelectionConfig, tensor: int, sequence: int
) -> None:
    inputs = make_inputs(num_qo_heads, num_kv_heads)
    whole = shard_heads(num_qo_heads, num_kv_heads, 0, 1)
    own = TorchCache(make_pieces(num_kv_heads), ROPE, config, num_kv_heads=num_kv_heads)
    expected = use(own, inputs, config, whole)
    pieces = make_pieces(num_kv_heads)
    with pytest.MonkeyPatch.context() as patch:
        joint = record_votes(patch)

        def work(mesh: Mesh) -> Found:
            shard = shard_heads(num_qo_heads, num_kv_heads, mesh.tensor.rank, mesh.tensor.size)
            backend = ShardedBackend(shard, mesh, share_tokens=16)
            cache = backend.cache(pieces, ROPE, config)
            return use(cache, inputs, config, shard, expected.selected)

        found = run_ranks(tensor, sequence, work)
    votes = [expected_votes(inputs, at, config) for at in range(len(STARTS))]
    decided = [at for at in range(len(STARTS)) if votes[at].total.shape[1] > config.top_k]
    assert len(decided) == 3  # the first chunk takes all there is
    for at, cast in zip(decided, joint, strict=True):
        assert ((cast - votes[at].total).abs() <= votes[at].near).all()
    for rank, one in enumerate(found):
        shard = shard_heads(num_qo_heads, num_kv_heads, rank % tensor, tensor)
        sets = range(*shard.kv) if config.sets == "per_kv_head" else [0]
        for at in decided:
            for row, number in zip(one.selected[at], sets, strict=True):
                check_indices(row, votes[at], number, config.n_init)
        heads = slice(shard.first, shard.last)
        torch.testing.assert_close(one.shares, expected.shares, rtol=LIMIT, atol=0.0)
        torch.testing.assert_close(
            one.attention, expected.attention[:, heads], rtol=1e-5, atol=1e-6
        )
    for own_piece, piece in zip(make_pieces(num_kv_heads), pieces, strict=True):
        rows = slice(own_piece.start, own_piece.start + own_piece.capacity)
        assert torch.equal(torch.from_numpy(piece.keys(0)), inputs.k[rows])
        assert torch.equal(torch.from_numpy(piece.values(0)), inputs.v[rows])


def record_votes(patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The votes of all ranks, in the order in which rank 0 settles them."""
    settle, lock = election._settle, threading.Lock()
    found: list[torch.Tensor] = []

    def settle_and_note(
        total: torch.Tensor, race: Race, count: int, smoothing: int
    ) -> torch.Tensor:
        with lock:
            found.append(total.clone())
        return settle(total, race, count, smoothing)

    patch.setattr(election, "_settle", settle_and_note)
    return found


@pytest.mark.parametrize(("tensor", "sequence"), MESHES)
@pytest.mark.parametrize("heads", HEADS)
def test_any_split_of_heads_and_tokens_equals_one(heads: str, tensor: int, sequence: int) -> None:
    compare(*HEADS[heads], BASE, tensor, sequence)


@pytest.mark.parametrize(("tensor", "sequence"), [(4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("name", ["per_kv_head", "topk", "head_vote", "head_vote_per_kv_head"])
def test_every_policy(name: str, tensor: int, sequence: int) -> None:
    policy = VARIANTS[name]
    config = dataclasses.replace(BASE, function=policy.function, sets=policy.sets)
    compare(9, 3, config, tensor, sequence)
