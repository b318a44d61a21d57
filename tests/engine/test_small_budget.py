"""With a budget far below the prompt's length, the engine equals the naive oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.engine.naive import naive_forward
from tests.tiny_models import make_engine, make_oracle, memory_piece, token_ids
from tsdoc.engine.engine import Engine
from tsdoc.engine.forward import chunk_bounds
from tsdoc.engine.generate import GenerationConfig
from tsdoc.errors import UsageError
from tsdoc.kernels.kv import MemoryPiece
from tsdoc.kernels.selection import SelectionConfig

SMALL = SelectionConfig(n_init=4, n_local=12, top_k=10, chunk_size=16)
VARIANTS = {
    "paper": SMALL,
    "per_kv_head": dataclasses.replace(SMALL, sets="per_kv_head"),
    "topk": dataclasses.replace(SMALL, function="topk"),
    "head_vote": dataclasses.replace(SMALL, function="head_vote"),
    "head_vote_per_kv_head": dataclasses.replace(SMALL, function="head_vote", sets="per_kv_head"),
    "smoothing": dataclasses.replace(SMALL, smoothing=5),
    "chunk_above_local": dataclasses.replace(SMALL, chunk_size=32, n_local=8),
    "chunk_of_one": dataclasses.replace(SMALL, chunk_size=1),
    "no_multiple": dataclasses.replace(SMALL, n_init=5, n_local=11, chunk_size=8),
}


def last_logits(
    engine: Engine, pieces: list[MemoryPiece], ids: np.ndarray, at: int
) -> torch.Tensor:
    tokens = torch.from_numpy(ids[at:].astype(np.int64))
    logits = engine.runner.run_chunks(
        engine.cache(pieces), tokens, at, [(at, len(ids))], need_logits=True
    )
    assert logits is not None
    return logits


@pytest.mark.parametrize("name", VARIANTS)
def test_engine_equals_the_naive_oracle(name: str) -> None:
    config = VARIANTS[name]
    oracle = make_oracle("qwen2", seed=3)
    engine = make_engine(oracle, config)
    ids = token_ids(170, seed=4)
    piece = memory_piece(engine, len(ids))
    engine.prefill([piece], ids[:160], 0, prefill_block=64, on_block=lambda end: None)
    chunks = [*chunk_bounds(0, 160, config.chunk_size), (160, 170)]
    expected, _ = naive_forward(oracle, ids, chunks, config)
    assert (last_logits(engine, [piece], ids, 160) - expected[-1]).abs().max() <= 1e-3


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_every_rope_type_equals_the_naive_oracle(family: str, rope: str) -> None:
    oracle = make_oracle(family, rope=rope, seed=5)
    engine = make_engine(oracle, SMALL)
    ids = token_ids(140, seed=6)
    piece = memory_piece(engine, len(ids))
    engine.prefill([piece], ids[:128], 0, prefill_block=32, on_block=lambda end: None)
    expected, _ = naive_forward(oracle, ids, [*chunk_bounds(0, 128, 16), (128, 140)], SMALL)
    assert (last_logits(engine, [piece], ids, 128) - expected[-1]).abs().max() <= 1e-3


def test_selection_differs_from_full_attention() -> None:
    # Guards the tests above: a budget that is not small would make them vacuous.
    oracle = make_oracle("qwen2", seed=3)
    ids = token_ids(170, seed=4)
    small, _ = naive_forward(oracle, ids, [*chunk_bounds(0, 160, 16), (160, 170)], SMALL)
    full, _ = naive_forward(oracle, ids, [(0, 170)], dataclasses.replace(SMALL, top_k=1000))
    assert (small[-1] - full[-1]).abs().max() > 0.05


@pytest.mark.parametrize("block", [16, 48, 64, 160, 4096])
def test_any_block_size_writes_the_same_pages(block: int) -> None:
    oracle = make_oracle("llama", seed=7)
    engine = make_engine(oracle, SMALL)
    ids = token_ids(200, seed=8)
    reference, piece = (memory_piece(engine, len(ids)) for _ in range(2))
    engine.prefill([reference], ids, 0, prefill_block=32, on_block=lambda end: None)
    engine.prefill([piece], ids, 0, prefill_block=block, on_block=lambda end: None)
    for layer in range(3):
        np.testing.assert_allclose(piece.keys(layer), reference.keys(layer), atol=2e-5)
        np.testing.assert_allclose(piece.values(layer), reference.values(layer), atol=2e-5)


def test_going_on_from_a_committed_block_is_bit_identical() -> None:
    oracle = make_oracle("llama", seed=7)
    engine = make_engine(oracle, SMALL)
    ids = token_ids(200, seed=8)
    reference, first = memory_piece(engine, 200), memory_piece(engine, 96)
    second = memory_piece(engine, 104, start=96)
    engine.prefill([reference], ids, 0, prefill_block=32, on_block=lambda end: None)
    engine.prefill([first], ids[:96], 0, prefill_block=32, on_block=lambda end: None)
    ends: list[int] = []
    engine.prefill([first, second], ids, 96, prefill_block=32, on_block=ends.append)
    assert ends == [128, 160, 192, 200]
    for layer in range(3):
        joined = np.concatenate((first.keys(layer), second.keys(layer)))
        assert np.array_equal(joined, reference.keys(layer))


def test_keys_and_values_depend_on_no_later_chunk() -> None:
    oracle = make_oracle("qwen3", seed=9)
    engine = make_engine(oracle, SMALL)
    ids = token_ids(160, seed=10)
    other = np.concatenate((ids[:96], token_ids(64, seed=11)))
    pieces = [memory_piece(engine, 160) for _ in range(2)]
    for piece, tokens in zip(pieces, (ids, other), strict=True):
        engine.prefill([piece], tokens, 0, prefill_block=64, on_block=lambda end: None)
    for layer in range(3):
        assert np.array_equal(pieces[0].keys(layer)[:96], pieces[1].keys(layer)[:96])
        assert not np.array_equal(pieces[0].keys(layer)[96:], pieces[1].keys(layer)[96:])


def test_decode_without_selection_cache_equals_chunks_of_one() -> None:
    oracle = make_oracle("qwen2", seed=12)
    engine = make_engine(oracle, SMALL)
    ids = token_ids(140, seed=13)
    piece = memory_piece(engine, 160)
    engine.prefill([piece], ids[:128], 0, prefill_block=64, on_block=lambda end: None)
    config = GenerationConfig(
        max_new_tokens=12, stop_ids=frozenset(), question_chunk_size=16, theta=None
    )
    answer = list(engine.generate([piece], ids[128:].tolist(), 128, config))
    tokens = np.concatenate((ids, np.array(answer, dtype=np.int32)))
    chunks = [*chunk_bounds(0, 128, 16), (128, 140), *((i, i + 1) for i in range(140, 151))]
    expected, _ = naive_forward(oracle, tokens[:151], chunks, SMALL)
    assert answer == expected[139:].argmax(-1).tolist()


def test_candidates_can_be_restricted_to_ranges() -> None:
    oracle = make_oracle("qwen2", seed=12)
    engine = make_engine(oracle, SMALL)
    ids = token_ids(160, seed=13)
    piece = memory_piece(engine, 160)
    engine.prefill([piece], ids[:150], 0, prefill_block=64, on_block=lambda end: None)
    cache = engine.cache([piece])
    from tsdoc.kernels.selection import chunk_range

    around = chunk_range(150, 160, SMALL)
    queries = torch.randn(1, 6, 16)
    (inside,) = cache.select(0, queries, [around], [(20, 26), (60, 90)])
    assert inside.shape == (1, 10)
    assert all(20 <= i < 26 or 60 <= i < 90 for i in inside[0].tolist())
    (few,) = cache.select(0, queries, [around], [(20, 23)])
    assert few.tolist() == [[20, 21, 22]]
    (none,) = cache.select(0, queries, [around], [(0, 2)])
    assert none.shape == (1, 0)


def test_a_budget_beyond_the_trained_window_is_refused() -> None:
    oracle = make_oracle("llama", max_position_embeddings=64)
    with pytest.raises(UsageError, match="trained window of 64"):
        make_engine(oracle, SelectionConfig(n_init=4, n_local=12, top_k=60, chunk_size=16))
