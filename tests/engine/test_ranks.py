"""Several ranks, as threads, equal one: prefill, questions, decode, evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.engine.test_small_budget import SMALL, VARIANTS
from tests.thread_ranks import run_ranks
from tests.tiny_models import make_config, make_engine, make_oracle, memory_piece, token_ids
from tsdoc.engine.decoder import Decoder
from tsdoc.engine.engine import Engine
from tsdoc.engine.evidence import look
from tsdoc.engine.generate import GenerationConfig
from tsdoc.engine.sharding import shard_model
from tsdoc.engine.team import ALONE, Team
from tsdoc.errors import UsageError
from tsdoc.kernels.kv import MemoryPiece
from tsdoc.kernels.ranks import Mesh, SoloRanks
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.sharded_cache import ShardedBackend
from tsdoc.kernels.spread_cache import SpreadBackend
from tsdoc.models.locate import LocatedModel
from tsdoc.models.weights import open_weights
from tsdoc.prompt.tokenizer import TextTokenizer

PROMPT, QUESTION, ROOM, NEW = 150, 12, 40, 8
HEADS = {"6/2": (6, 2), "9/3": (9, 3), "14/2": (14, 2), "5/5": (5, 5)}
# Qwen2-72B's proportions: 64 query heads for 8 KV heads, biases, a head of its own, and a wide
# layer that no number of ranks divides.
QWEN2_72B: dict[str, Any] = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "hidden_size": 64,
    "intermediate_size": 231,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}


@dataclass
class Outcome:
    tokens: list[int]
    logits: torch.Tensor
    votes: torch.Tensor
    attention: torch.Tensor
    hits: int


def sharded_engine(
    oracle: transformers.PreTrainedModel,
    selection: SelectionConfig,
    mesh: Mesh,
    *,
    spread: bool = False,
) -> Engine:
    config = make_config(oracle)
    shard = shard_model(config, mesh.tensor)
    weights = shard.weights(oracle.state_dict())
    backend = ShardedBackend(shard.heads, mesh, share_tokens=16)
    if spread:
        backend = SpreadBackend(
            shard.heads,
            mesh,
            num_layers=config.num_layers,
            head_dim=config.head_dim,
            kv_dtype="float32",
            share_tokens=16,
        )
    return Engine(
        Decoder(shard.config, weights, torch.float32, shard.split),
        selection,
        max_tokens=4096,
        question_chunk_size=selection.chunk_size,
        backend=backend,
        team=Team(mesh=mesh),
    )


def answer(engine: Engine, pieces: list[MemoryPiece], ids: np.ndarray) -> Outcome:
    """Prefills, asks, answers greedily, looks where it came from; the same on every rank."""
    engine.prefill(pieces, ids[:PROMPT], 0, prefill_block=64, on_block=lambda end: None)
    config = GenerationConfig(
        max_new_tokens=NEW,
        stop_ids=frozenset(),
        question_chunk_size=8,
        theta=0.9,
        keep_queries=True,
    )
    generation = engine.generate(pieces, ids[PROMPT:].tolist(), PROMPT, config)
    tokens = list(generation)
    assert generation.log is not None
    seen = look(engine.runner, generation.cache, generation.log, (6, PROMPT), question_chunk_size=8)
    at = PROMPT + QUESTION
    logits = engine.runner.run_chunks(
        engine.cache(pieces), torch.tensor([7, 8, 9]), at, [(at, at + 3)], need_logits=True
    )
    assert logits is not None
    return Outcome(tokens, logits, seen.votes, seen.attention, generation.reuse.num_hits)


def pieces_of(engine: Engine) -> list[MemoryPiece]:
    return [memory_piece(engine, PROMPT), memory_piece(engine, ROOM, start=PROMPT)]


def compare(
    oracle: transformers.PreTrainedModel,
    selection: SelectionConfig,
    tensor: int,
    sequence: int = 1,
    *,
    spread: bool = False,
) -> None:
    single = make_engine(oracle, selection, question_chunk_size=selection.chunk_size)
    ids = token_ids(PROMPT + QUESTION, seed=4)
    reference, shared = pieces_of(single), pieces_of(single)
    expected = answer(single, reference, ids)

    def work(mesh: Mesh) -> Outcome:
        engine = sharded_engine(oracle, selection, mesh, spread=spread)
        pieces: list[MemoryPiece] = shared
        if isinstance(engine.backend, SpreadBackend) and mesh.world.rank > 0:
            pieces = [engine.backend.own_piece(one.start, one.capacity) for one in shared]
        return answer(engine, pieces, ids)

    outcomes = run_ranks(tensor, sequence, work)
    for found in outcomes:
        assert found.tokens == expected.tokens
        assert found.hits == expected.hits
        assert (found.logits - expected.logits).abs().max() <= 1e-3
        torch.testing.assert_close(found.votes, expected.votes, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(found.attention, expected.attention, rtol=1e-3, atol=1e-6)
    for one, other in zip(reference, shared[: 1 if spread else 2], strict=not spread):
        for layer in range(3):
            np.testing.assert_allclose(other.keys(layer), one.keys(layer), atol=1e-4)
            np.testing.assert_allclose(other.values(layer), one.values(layer), atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_equal_one(name: str) -> None:
    compare(make_oracle("qwen2", seed=3), VARIANTS[name], 2)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_heads_are_split_evenly_or_not(heads: str, ranks: int) -> None:
    queries, keys = HEADS[heads]
    oracle = make_oracle("qwen2", seed=5, num_attention_heads=queries, num_key_value_heads=keys)
    compare(oracle, SMALL, ranks)


@pytest.mark.parametrize(("tensor", "sequence"), [(4, 1), (2, 2)])
def test_ranks_split_a_model_of_the_72b_shape(tensor: int, sequence: int) -> None:
    compare(make_oracle("qwen2", seed=9, **QWEN2_72B), SMALL, tensor, sequence)


@pytest.mark.parametrize("name", ["per_kv_head", "head_vote_per_kv_head", "topk", "smoothing"])
def test_groups_that_are_cut_vote_as_one(name: str) -> None:
    oracle = make_oracle("qwen3", seed=6, num_attention_heads=9, num_key_value_heads=3)
    compare(oracle, VARIANTS[name], 2)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_every_family(family: str) -> None:
    compare(make_oracle(family, rope="yarn", seed=7), SMALL, 3)


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_share_the_tokens(name: str) -> None:
    compare(make_oracle("qwen2", seed=3), VARIANTS[name], 1, 2)


@pytest.mark.parametrize(("tensor", "sequence"), [(1, 3), (1, 4), (2, 2), (3, 2), (4, 2)])
def test_heads_and_tokens_are_shared_at_once(tensor: int, sequence: int) -> None:
    oracle = make_oracle("qwen2", seed=5, num_attention_heads=9, num_key_value_heads=3)
    compare(oracle, SMALL, tensor, sequence)
    compare(oracle, VARIANTS["head_vote_per_kv_head"], tensor, sequence)


@pytest.mark.parametrize(("tensor", "sequence"), [(2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("heads", ["9/3", "14/2"])
def test_ranks_share_no_memory(heads: str, tensor: int, sequence: int) -> None:
    queries, keys = HEADS[heads]
    oracle = make_oracle("qwen2", seed=5, num_attention_heads=queries, num_key_value_heads=keys)
    compare(oracle, SMALL, tensor, sequence, spread=True)


def test_everything_fits_the_budget_of_ranks_that_share_the_tokens() -> None:
    compare(make_oracle("llama", seed=7), dataclasses.replace(SMALL, top_k=3000), 1, 3)


def test_ranks_score_as_many_chunks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from tsdoc.kernels import torch_selection

    # 14 / 2 heads over 4 ranks: 4, 6, 3 and 3 heads once padded.
    monkeypatch.setattr(torch_selection, "SCORE_BYTES", 4 * 4 * 130 * 2)
    oracle = make_oracle("qwen2", seed=5, num_attention_heads=14, num_key_value_heads=2)
    compare(oracle, SMALL, 4)


def test_everything_fits_the_budget() -> None:
    compare(make_oracle("llama", seed=7), dataclasses.replace(SMALL, top_k=3000), 2)


def test_tied_embeddings_and_a_vocabulary_that_does_not_divide() -> None:
    compare(make_oracle("llama", seed=8, tie_word_embeddings=True), SMALL, 4)


def test_more_ranks_than_query_heads_are_refused() -> None:
    ranks = SoloRanks()
    ranks.size = 7
    with pytest.raises(UsageError, match="6 query heads cannot be split over 7 ranks"):
        shard_model(make_config(make_oracle("llama")), ranks)


@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("tensor", "sequence"), [(2, 1), (3, 1), (4, 1), (1, 2), (2, 2)])
def test_the_tiny_model_answers_the_same(
    tensor: int, sequence: int, packaged_model: Callable[[str], LocatedModel]
) -> None:
    """9 query and 3 KV heads, with a budget far below the prompt's length."""
    model = packaged_model("tiny")
    weights = open_weights(model.directory)
    selection = SelectionConfig(n_init=16, n_local=64, top_k=128, chunk_size=64)
    text = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")
    ids = TextTokenizer(model.directory).encode(text)[0][:700]

    def answer(mesh: Mesh | None) -> list[int]:
        if mesh is None:
            decoder, backend, team = Decoder(model.config, weights, torch.float32), None, ALONE
        else:
            shard = shard_model(model.config, mesh.tensor)
            own = shard.weights(weights)
            decoder = Decoder(shard.config, own, torch.float32, shard.split)
            backend = ShardedBackend(shard.heads, mesh, share_tokens=64)
            team = Team(mesh=mesh)
        engine = Engine(
            decoder,
            selection,
            max_tokens=1024,
            question_chunk_size=64,
            backend=backend,
            team=team,
        )
        engine.prefill([piece], ids[:640], 0, prefill_block=256, on_block=lambda end: None)
        config = GenerationConfig(
            max_new_tokens=8, stop_ids=frozenset(), question_chunk_size=64, theta=0.9
        )
        return list(engine.generate([piece], ids[640:].tolist(), 640, config))

    shape = model.config
    piece = MemoryPiece(
        start=0,
        capacity=720,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kv_dtype="float32",
    )
    expected = answer(None)
    for found in run_ranks(tensor, sequence, answer):
        assert found == expected
