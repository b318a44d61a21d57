"""The key index in plain torch: codes, approximate scores, and selection by it on the CPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tsdoc.kernels.index import (
    RANK,
    REFINED,
    STEPS_PER_SIGMA,
    approximate_scores,
    build,
    encode,
    epoch_end,
    find_basis,
    pack,
    query_moment,
    query_weights,
    sample_positions,
    unpack,
)
from tsdoc.kernels.index_use import IndexConfig, IndexWatch
from tsdoc.kernels.kv import LayerIndex, MemoryPiece
from tsdoc.kernels.rope import make_rope_table
from tsdoc.kernels.selection import ChunkRange, SelectionConfig, chunk_range, votes
from tsdoc.kernels.torch_cache import TorchCache
from tsdoc.kernels.torch_index import make_layer_index, select_by_index
from tsdoc.models.config import RopeConfig

KV_HEADS, GROUP, DIM = 2, 3, 64
CONFIG = SelectionConfig(n_init=4, n_local=12, top_k=40, chunk_size=8)


def make_keys(count: int, seed: int = 0) -> torch.Tensor:
    """Keys near a subspace and off the origin, as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    narrow = torch.randn(count, KV_HEADS, 24, generator=generator)
    axes = torch.randn(KV_HEADS, 24, DIM, generator=generator) * 0.4
    noise = torch.randn(count, KV_HEADS, DIM, generator=generator) * 0.1
    centre = torch.randn(KV_HEADS, DIM, generator=generator)
    return torch.einsum("nkr,krd->nkd", narrow, axes) + noise + centre


def test_codes_survive_packing() -> None:
    codes = torch.randint(0, 16, (KV_HEADS, 768, RANK), dtype=torch.uint8)
    packed = pack(codes)
    assert packed.shape == (KV_HEADS, 384, RANK)
    assert torch.equal(unpack(packed), codes)


def test_two_codes_share_a_byte_with_the_token_half_a_page_on() -> None:
    codes = torch.zeros(1, 256, RANK, dtype=torch.uint8)
    codes[0, 3, 5], codes[0, 131, 5] = 7, 9
    assert int(pack(codes)[0, 3, 5]) == 7 + 16 * 9


@pytest.mark.parametrize("count", [1, 255, 257, 600])
@pytest.mark.parametrize("step", [256, 16_384])
def test_an_index_is_the_same_in_whatever_steps_it_is_built(count: int, step: int) -> None:
    keys = make_keys(count)
    basis = find_basis(keys)
    packed = torch.zeros(KV_HEADS, -(-count // 256) * 128, RANK, dtype=torch.uint8)
    for start in range(0, count, 100):  # each time from where the last one ended
        build(lambda a, b: keys[a:b], basis, packed, start, min(start + 100, count), step=step)
    assert torch.equal(unpack(packed)[:, :count], encode(keys, basis))


def test_approximate_scores_are_near_the_exact_ones() -> None:
    keys = make_keys(1000)
    basis = find_basis(keys)
    query = torch.randn(1, KV_HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(1))
    packed = torch.zeros(KV_HEADS, 512, RANK, dtype=torch.uint8)
    build(lambda a, b: keys[a:b], basis, packed, 0, 1000)
    weights, offsets = query_weights(query, basis.axes, basis.centre)
    guess = approximate_scores(weights[0], offsets[0], packed)[:, :1000]
    grouped = query.view(KV_HEADS, GROUP, DIM)
    exact = torch.einsum("kgd,nkd->kgn", grouped, keys).flatten(0, 1)
    spread = (exact - exact.mean(-1, keepdim=True)).pow(2).mean().sqrt()
    assert float((guess - exact).pow(2).mean().sqrt()) < 0.2 * float(spread)


def errors(keys: torch.Tensor, queries: torch.Tensor, moment: torch.Tensor | None) -> float:
    """Root of the mean squared error of approximate scores, by the spread of the exact ones."""
    basis = find_basis(keys, moment)
    packed = torch.zeros(KV_HEADS, len(keys) // 2, RANK, dtype=torch.uint8)
    build(lambda a, b: keys[a:b], basis, packed, 0, len(keys))
    exact = torch.einsum("qkgd,nkd->qkgn", queries.unflatten(1, (KV_HEADS, -1)), keys).flatten(1, 2)
    weights, offsets = query_weights(queries, basis.axes, basis.centre)
    guess = torch.stack(
        [approximate_scores(w, o, packed) for w, o in zip(weights, offsets, strict=True)]
    )
    spread = (exact - exact.mean(-1, keepdim=True)).pow(2).mean().sqrt()
    return float((guess - exact).pow(2).mean().sqrt() / spread)


def test_directions_are_those_that_queries_ask_about() -> None:
    """Keys vary most where no query looks."""
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(1024, KV_HEADS, DIM, generator=generator)
    keys[..., 20:] *= 2
    queries = torch.randn(64, KV_HEADS * GROUP, DIM, generator=generator)
    queries[..., 20:] *= 0.01
    moment = query_moment(queries[:32], KV_HEADS)
    torch.testing.assert_close(
        moment.diagonal(dim1=1, dim2=2).sum(-1), torch.full((KV_HEADS,), DIM).double()
    )
    assert errors(keys, queries[32:], None) > 0.5
    assert errors(keys, queries[32:], moment) < 0.2


def test_leading_directions_are_known_sixteen_times_as_well() -> None:
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(1024, KV_HEADS, DIM, generator=generator) * 1e-4
    keys[..., :REFINED] = torch.randn(1024, KV_HEADS, REFINED, generator=generator)
    queries = torch.randn(8, KV_HEADS * GROUP, DIM, generator=generator)
    step = 1 / STEPS_PER_SIGMA / 16
    assert 0.8 < errors(keys, queries, None) / (step / 12**0.5) < 1.2


def test_bases_depend_on_the_epoch_alone() -> None:
    assert epoch_end(5000) == 5000
    assert epoch_end(8192) == 8192
    assert epoch_end(9000) == epoch_end(16_383) == 8192
    assert epoch_end(16_384) == 16_384
    for count in (1, 9000, 100_000):
        positions = sample_positions(count)
        assert len(positions) <= 16_384
        assert int(positions[-1]) < epoch_end(count)


class IndexedPiece(MemoryPiece):
    """A piece whose keys are indexed, and which notes the rows that are read."""

    def __init__(self, start: int, count: int) -> None:
        super().__init__(
            start=start, capacity=count, num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM,
            kv_dtype="float32",
        )  # fmt: skip
        self.made: LayerIndex | None = None
        self.noted: set[int] = set()

    def index(self, layer: int) -> LayerIndex | None:
        return self.made

    def check_rows(self, layer: int, positions: np.ndarray) -> None:
        self.noted |= set(positions.tolist())

    def check_range(self, layer: int, start: int, end: int) -> None:
        self.noted |= set(range(max(start, self.start), min(end, self.start + self.capacity)))


def make_cache(
    sizes: list[int], indexed: list[bool], candidates: int, watch: IndexWatch | None = None
) -> tuple[TorchCache, list[IndexedPiece], torch.Tensor]:
    keys = make_keys(sum(sizes), seed=5)
    pieces, start = [], 0
    for size, is_indexed in zip(sizes, indexed, strict=True):
        piece = IndexedPiece(start, size)
        piece.keys(0)[:] = keys[start : start + size].numpy()
        piece.made = make_layer_index(keys[start : start + size]) if is_indexed else None
        pieces.append(piece)
        start += size
    rope = make_rope_table(RopeConfig(rope_type="default", theta=1e4), DIM, 256)
    if watch is None and candidates:
        watch = IndexWatch(IndexConfig(candidates=candidates, few=candidates, sample=1 << 20))
        watch.note(0, 1.0)  # else the first selection would be made exactly too
    cache = TorchCache(pieces, rope, CONFIG, num_kv_heads=KV_HEADS, index=watch)
    return cache, pieces, keys


def exact_votes(keys: torch.Tensor, query: torch.Tensor, low: int, high: int) -> torch.Tensor:
    grouped = query.view(KV_HEADS, GROUP, DIM) * DIM**-0.5
    logits = torch.einsum("kgd,nkd->kgn", grouped, keys[low:high]).flatten(0, 1)
    return votes(logits, CONFIG, num_selected=CONFIG.top_k, num_kv_heads=KV_HEADS)[0]


LAYOUTS = [([3000], [True]), ([1500, 1500], [True, True]), ([2600, 300, 100], [True, False, True])]


@pytest.mark.parametrize(("sizes", "indexed"), LAYOUTS)
@pytest.mark.parametrize("allowed", [None, [(50, 1200), (1400, 2950)]])
def test_almost_all_votes_are_caught_and_few_keys_are_read(
    sizes: list[int], indexed: list[bool], allowed: list[tuple[int, int]] | None
) -> None:
    cache, pieces, keys = make_cache(sizes, indexed, 2)
    whole, _, _ = make_cache(sizes, indexed, 0)
    around = chunk_range(2990, 2991, CONFIG)
    query = torch.randn(1, KV_HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(9)) * 2
    (chosen,) = cache.select(0, query, [around], allowed)
    (best,) = whole.select(0, query, [around], allowed)
    assert chosen.shape == best.shape == (1, CONFIG.top_k)
    assert chosen[0].tolist() == sorted(set(chosen[0].tolist()))
    share = exact_votes(keys, query[0], 0, 3000)
    assert float(share[chosen[0]].sum() / share[best[0]].sum()) > 0.97
    if allowed is not None:
        assert all(any(a <= p < b for a, b in allowed) for p in chosen[0].tolist())
    bare = sum(n for n, is_indexed in zip(sizes, indexed, strict=True) if not is_indexed)
    assert sum(len(piece.noted) for piece in pieces) <= 2 * CONFIG.top_k + bare


@pytest.mark.parametrize(("sizes", "indexed"), LAYOUTS)
def test_with_all_as_candidates_the_selection_is_exact(
    sizes: list[int], indexed: list[bool]
) -> None:
    cache, _, _ = make_cache(sizes, indexed, 18)  # 720 of them: the index still is worth it
    whole, _, _ = make_cache(sizes, indexed, 0)
    around = chunk_range(2990, 2991, CONFIG)
    query = torch.randn(1, KV_HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(9)) * 2
    (chosen,), (best,) = (c.select(0, query, [around]) for c in (cache, whole))
    assert torch.equal(chosen, best)


@pytest.mark.parametrize(
    "change", [{"function": "topk"}, {"sets": "per_kv_head"}, {"smoothing": 3}]
)
def test_what_the_index_cannot_do_is_selected_exactly(change: dict[str, object]) -> None:
    config = dataclasses.replace(CONFIG, **change)  # type: ignore[arg-type]
    assert not IndexConfig().applies(config, 1 << 20)


def test_short_prompts_are_selected_exactly() -> None:
    assert not IndexConfig(candidates=2).applies(CONFIG, 319)
    assert IndexConfig(candidates=2).applies(CONFIG, 320)


def test_samples_are_made_both_ways_and_a_layer_below_the_floor_is_left_to_exact_selection() -> (
    None
):
    watch = IndexWatch(IndexConfig(candidates=2, few=2, sample=2, floor=0.9))
    cache, pieces, _ = make_cache([3000], [True], 2, watch)
    around = chunk_range(2990, 2991, CONFIG)
    query = torch.randn(1, KV_HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(9)) * 2
    chosen = [cache.select(0, query, [around])[0] for _ in range(4)]
    assert watch.num_samples == 3
    assert watch.mean_share is not None
    assert 0.97 < watch.mean_share <= 1.0
    assert watch.least_share == watch.mean_share
    assert torch.equal(chosen[0], chosen[2])
    assert watch.is_trusted(0)
    for _ in range(4):
        watch.note(0, 0.5)
    assert not watch.is_trusted(0)
    assert watch.is_trusted(1)
    pieces[0].noted.clear()
    whole, _, _ = make_cache([3000], [True], 0)
    assert torch.equal(cache.select(0, query, [around])[0], whole.select(0, query, [around])[0])
    assert watch.num_samples == 7


def test_each_layers_first_selection_is_made_both_ways() -> None:
    watch = IndexWatch(IndexConfig())
    assert watch.known(3) == [None, None, None]
    for layer in (0, 1, 2):
        assert watch.wants_sample(layer)
        watch.note(layer, 0.9 + layer / 100)
        assert not watch.wants_sample(layer)
    assert watch.known(4) == [0.9, 0.91, 0.92, None]
    assert [watch.is_trusted(layer) for layer in range(4)] == [False, False, False, True]


@pytest.mark.parametrize("num_layers", [24, 28, 30, 32, 48, 64, 80])
def test_every_layer_has_more_selections_made_both_ways(num_layers: int) -> None:
    config = IndexConfig()
    watch = IndexWatch(config)
    for layer in range(num_layers):
        watch.note(layer, 1.0)
    turns = (number % num_layers for number in range(num_layers * config.sample))
    sampled = [layer for layer in turns if watch.wants_sample(layer)]
    assert len(sampled) == len(set(sampled)) == num_layers


def test_a_piece_without_any_candidate_does_not_spoil_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    size = 2048
    keys = torch.randn(2 * size, 1, 64, generator=generator)
    keys[:, :, 0] += 60.0  # a bias that all keys share, and a query against it
    pieces = [
        (IndexedPiece(0, size), make_layer_index(keys[:size])),
        (IndexedPiece(size, size), make_layer_index(keys[size:])),
    ]
    query = torch.zeros(2, 64)
    query[:, 0], query[0, 1], query[1, 2] = -20.0, 8.0, 8.0
    scaled = query * 64**-0.5

    def exact(positions: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hd,nd->hn", scaled, keys[positions, 0])

    around = ChunkRange(start=2 * size, end=2 * size + 1, init_end=128, local_start=2 * size - 512)
    for allowed in (None, [(size, 2 * size)]):
        selected = select_by_index(
            pieces, scaled, around, allowed, exact, top_k=64, num_candidates=128
        )
        assert selected.shape == (1, 64)


@pytest.mark.parametrize(("sizes", "indexed"), LAYOUTS)
@pytest.mark.parametrize("room", [1 << 26, 4 * 6 * 2930 * 2])
def test_what_tokens_look_at_is_found_by_reading_few_indexed_keys(
    sizes: list[int], indexed: list[bool], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsdoc.kernels.torch_index.VOTES_BYTES", room)
    monkeypatch.setattr("tsdoc.kernels.torch_index.NUM_RUNS", 40)
    cache, pieces, _ = make_cache(sizes, indexed, 2)
    whole, _, _ = make_cache(sizes, indexed, 0)
    queries = torch.randn(5, KV_HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(4)) * 2
    votes, expected = (c.soft_votes(0, queries, 20, 2950) for c in (cache, whole))
    assert votes.shape == expected.shape
    assert float(votes.sum()) == pytest.approx(1, abs=1e-4)
    assert float((votes - expected).abs().sum()) < 0.25  # half of it is voted elsewhere
    bare = sum(n for n, is_indexed in zip(sizes, indexed, strict=True) if not is_indexed)
    batches = 1 if room > 1 << 20 else 3
    assert sum(len(piece.noted) for piece in pieces) <= batches * 16 * 40 + bare


def test_in_a_layer_below_the_floor_every_key_is_voted_on() -> None:
    watch = IndexWatch(IndexConfig(candidates=2, floor=0.9))
    cache, _, _ = make_cache([3000], [True], 2, watch)
    whole, _, _ = make_cache([3000], [True], 0)
    queries = torch.randn(5, KV_HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(4))
    watch.note(0, 0.5)
    votes, expected = (c.soft_votes(0, queries, 20, 2950) for c in (cache, whole))
    assert torch.equal(votes, expected)


def test_up_to_a_length_a_cpu_needs_few_candidates() -> None:
    assert IndexConfig().num_candidates(2048, 131_072) == 2560
    assert IndexConfig().num_candidates(2048, 131_073) == 3 * 2048


def test_where_as_many_candidates_as_are_selected_are_asked_for_no_indexed_key_is_read() -> None:
    cache, pieces, keys = make_cache([2600, 300, 100], [True, False, True], 1)
    around = chunk_range(2990, 2991, CONFIG)
    query = torch.randn(1, KV_HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(9)) * 2
    (chosen,) = cache.select(0, query, [around])
    assert chosen.shape == (1, CONFIG.top_k)
    assert not pieces[0].noted
    assert not pieces[2].noted
    share = exact_votes(keys, query[0], 0, 3000)
    best = share[4:2978].topk(CONFIG.top_k).values.sum()
    assert float(share[chosen[0]].sum() / best) > 0.9
