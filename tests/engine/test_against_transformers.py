"""With a budget that covers the prompt, the engine is the model: transformers is the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_models import (
    FAMILIES,
    ROPES,
    covering,
    make_config,
    make_engine,
    make_oracle,
    memory_piece,
    token_ids,
)
from tsdoc.engine.decoder import read_weights
from tsdoc.engine.engine import Engine
from tsdoc.engine.forward import chunk_bounds
from tsdoc.engine.generate import GenerationConfig
from tsdoc.errors import ModelError

TOLERANCE = 1e-3  # maximum absolute difference of logits in float32
NUM_TOKENS = 150


def engine_logits(engine: Engine, ids: np.ndarray, *, split: int, chunk: int) -> torch.Tensor:
    """Logits of the last token when ids[:split] are prefilled and the rest is a question."""
    piece = memory_piece(engine, len(ids))
    engine.prefill([piece], ids[:split], 0, prefill_block=64, on_block=lambda end: None)
    cache = engine.cache([piece])
    logits = None
    for first, last in chunk_bounds(split, len(ids), chunk, split):
        tokens = torch.from_numpy(ids[first:last].astype(np.int64))
        logits = engine.runner.run_chunks(cache, tokens, first, [(first, last)], need_logits=True)
    assert logits is not None
    return logits


def oracle_logits(oracle: torch.nn.Module, ids: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return oracle(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, -1]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_rope_type_equals_transformers(family: str, rope: str) -> None:
    oracle = make_oracle(family, rope=rope)
    engine = make_engine(oracle, covering())
    ids = token_ids(NUM_TOKENS)
    actual = engine_logits(engine, ids, split=120, chunk=32)
    expected = oracle_logits(oracle, ids)
    assert expected.std() > 0.1
    assert (actual - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"num_key_value_heads": 6}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 10}),
        ("mistral", {"head_dim": 24}),
    ],
)
def test_variants_of_the_shape_equal_transformers(family: str, changes: dict[str, Any]) -> None:
    oracle = make_oracle(family, **changes)
    engine = make_engine(oracle, covering())
    ids = token_ids(NUM_TOKENS)
    actual = engine_logits(engine, ids, split=100, chunk=32)
    assert (actual - oracle_logits(oracle, ids)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("chunk", [1, 7, 32, 150])
@pytest.mark.parametrize("split", [0, 1, 33, 64, 149])
def test_any_chunk_size_and_split_equal_transformers(split: int, chunk: int) -> None:
    oracle = make_oracle("qwen2")
    engine = make_engine(oracle, covering(chunk_size=16), question_chunk_size=150)
    ids = token_ids(NUM_TOKENS)
    actual = engine_logits(engine, ids, split=split, chunk=chunk)
    assert (actual - oracle_logits(oracle, ids)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("theta", [None, 0.9])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str, theta: float | None) -> None:
    oracle = make_oracle(family, seed=1)
    engine = make_engine(oracle, covering())
    ids = token_ids(NUM_TOKENS, seed=2)
    piece = memory_piece(engine, NUM_TOKENS + 20)
    engine.prefill([piece], ids[:130], 0, prefill_block=64, on_block=lambda end: None)
    config = GenerationConfig(
        max_new_tokens=20, stop_ids=frozenset(), question_chunk_size=32, theta=theta
    )
    actual = list(engine.generate([piece], ids[130:].tolist(), 130, config))
    with torch.no_grad():
        expected = oracle.generate(
            torch.from_numpy(ids.astype(np.int64))[None],
            attention_mask=torch.ones(1, NUM_TOKENS, dtype=torch.int64),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
        )[0, NUM_TOKENS:].tolist()
    assert actual == expected


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2", {"num_layers": 1}), ("qwen2", {"qkv_bias": False}), ("qwen3", {"qk_norm": False})],
)
def test_weights_that_the_config_has_no_place_for_are_refused(
    family: str, changes: dict[str, Any]
) -> None:
    oracle = make_oracle(family)
    config = dataclasses.replace(make_config(oracle), **changes)
    weights = oracle.state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    with pytest.raises(ModelError, match=r"the weights hold model\.layers\.\S+, for which"):
        read_weights(config, weights)
    whole = make_config(oracle)
    assert read_weights(whole, weights).layer(0) is not None
