"""Queries are kept as they were computed, and votes among all keys tell what they looked at."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import make_engine, make_oracle, memory_piece, token_ids
from tsdoc.engine.engine import Engine
from tsdoc.engine.evidence import document_votes, look
from tsdoc.engine.generate import Generation, GenerationConfig
from tsdoc.kernels.kv import MemoryPiece
from tsdoc.kernels.selection import SelectionConfig

PROMPT, QUESTION = 200, 20
DOCUMENT = (6, 190)


def ask(
    selection: SelectionConfig, *, new_tokens: int = 5, chunk: int = 8
) -> tuple[Engine, list[MemoryPiece], Generation]:
    engine = make_engine(make_oracle("qwen2", seed=3), selection, question_chunk_size=chunk)
    ids = token_ids(PROMPT + QUESTION, seed=4)
    pieces = [memory_piece(engine, 200), memory_piece(engine, 60, start=200)]
    engine.prefill(pieces, ids[:PROMPT], 0, prefill_block=64, on_block=lambda end: None)
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        stop_ids=frozenset(),
        question_chunk_size=chunk,
        theta=0.9,
        keep_queries=True,
    )
    generation = engine.generate(pieces, ids[PROMPT:].tolist(), PROMPT, config)
    assert len(list(generation)) == new_tokens
    return engine, pieces, generation


SMALL = SelectionConfig(n_init=4, n_local=12, top_k=10, chunk_size=16)
COVERING = SelectionConfig(n_init=4, n_local=16, top_k=400, chunk_size=16)


@pytest.mark.parametrize("selection", [SMALL, COVERING], ids=["selected", "everything fits"])
def test_queries_of_the_last_chunk_and_of_every_token_that_was_run_are_kept(
    selection: SelectionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tsdoc.engine.decoder import Decoder

    plain = Decoder.project
    seen: list[torch.Tensor] = []

    def project(self: Decoder, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = plain(self, layer, hidden)
        if layer == 1:
            seen.append(result[0].clone())
        return result

    monkeypatch.setattr(Decoder, "project", project)
    _, _, generation = ask(selection)
    log = generation.log
    assert log is not None
    # 20 question tokens in chunks of 8, 8, 4, run together; the last of 5 new ones was never run.
    assert (log.start, log.question_end, log.end) == (216, 220, 224)
    expected = torch.cat(seen[-5:])[-8:]
    assert torch.equal(log.queries(1, 216, 224), expected)


@pytest.mark.parametrize("selection", [SMALL, COVERING], ids=["selected", "everything fits"])
def test_votes_count_all_keys_and_attention_only_those_attended(selection: SelectionConfig) -> None:
    engine, _, generation = ask(selection)
    assert generation.log is not None
    looked = look(engine.runner, generation.cache, generation.log, DOCUMENT, question_chunk_size=8)
    assert looked.votes.shape == (1, 184)  # the middle one of 3 layers
    torch.testing.assert_close(looked.votes.sum(dim=1), torch.ones(1))
    assert bool((looked.votes > 0).all())
    assert 0 < float(looked.attention.sum()) < 1
    whole = selection is COVERING
    assert bool((looked.attention > 0).all()) == whole


def test_the_neutral_question_itself_is_no_evidence() -> None:
    engine, pieces, _ = ask(SMALL)
    ids = token_ids(PROMPT + QUESTION, seed=4)[PROMPT:].tolist()
    cache = engine.cache(pieces)
    config = GenerationConfig(
        max_new_tokens=1,
        stop_ids=frozenset(),
        question_chunk_size=32,
        theta=None,
        keep_queries=True,
    )
    generation = engine.generate(pieces, ids, PROMPT, config)
    list(generation)
    assert generation.log is not None
    looked = look(engine.runner, cache, generation.log, DOCUMENT, question_chunk_size=32)
    same = document_votes(engine.runner, cache, ids, PROMPT, DOCUMENT, question_chunk_size=32)
    assert float(looked.evidence(same).max()) < 1e-6
    other = document_votes(
        engine.runner, cache, ids[::-1], PROMPT, DOCUMENT, question_chunk_size=32
    )
    assert float(looked.evidence(other).sum()) > 0.01


def test_without_evidence_no_query_is_kept() -> None:
    engine, pieces, _ = ask(SMALL)
    config = GenerationConfig(
        max_new_tokens=1, stop_ids=frozenset(), question_chunk_size=32, theta=None
    )
    generation = engine.generate(pieces, [5, 6], PROMPT, config)
    list(generation)
    assert generation.log is None
