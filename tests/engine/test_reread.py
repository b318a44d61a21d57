"""What a question looks at is read again before it, and nothing else changes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.tiny_models import make_engine, make_oracle, memory_piece, token_ids
from tsdoc.engine import reread
from tsdoc.engine.engine import Engine
from tsdoc.engine.evidence import Copy, Neutral, look
from tsdoc.engine.generate import Generation, GenerationConfig
from tsdoc.engine.reread import Reread, choose_stretches, repeated_words
from tsdoc.kernels.kv import MemoryPiece
from tsdoc.kernels.selection import SelectionConfig

PROMPT, QUESTION, NEW = 200, 20, 5
DOCUMENT = (6, 190)
SMALL = SelectionConfig(n_init=4, n_local=12, top_k=10, chunk_size=16)
COVERING = SelectionConfig(n_init=4, n_local=16, top_k=400, chunk_size=16)
IDS = token_ids(PROMPT + QUESTION, seed=4)
ASKED = IDS[PROMPT:].tolist()


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reread, "STRETCH", 8)


def make_one(num_tokens: int = 24) -> Reread:
    neutral = Neutral(ids=IDS[:7].tolist(), document=DOCUMENT, start=PROMPT)
    return Reread(ids=IDS, neutral=neutral, opening=[1, 2], between=[3], num_tokens=num_tokens)


def prefilled(selection: SelectionConfig) -> tuple[Engine, list[MemoryPiece]]:
    engine = make_engine(make_oracle("qwen2", seed=3), selection, question_chunk_size=8)
    pieces = [memory_piece(engine, PROMPT), memory_piece(engine, 100, start=PROMPT)]
    engine.prefill(pieces, IDS[:PROMPT], 0, prefill_block=64, on_block=lambda end: None)
    return engine, pieces


def answer(
    engine: Engine, pieces: list[MemoryPiece], question: list[int], **options: object
) -> Generation:
    config = GenerationConfig(
        max_new_tokens=NEW,
        stop_ids=frozenset(),
        question_chunk_size=8,
        theta=0.9,
        **options,  # type: ignore[arg-type]
    )
    generation = engine.generate(pieces, question, PROMPT, config)
    assert len(list(generation)) == NEW
    return generation


def test_the_answer_is_that_of_the_same_tokens_asked_at_once() -> None:
    generation = answer(*prefilled(SMALL), ASKED, reread=make_one())
    assert generation.copies
    written = list(generation.question)
    assert written[-QUESTION:] == ASKED
    # Chunks begin anew at the question's own first token, as if it had been a turn of its own.
    split = len(written) - QUESTION
    engine, pieces = prefilled(SMALL)
    engine.runner.run_chunks(
        engine.cache(pieces),
        torch.tensor(written[:split]),
        PROMPT,
        [(at, min(at + 8, PROMPT + split)) for at in range(PROMPT, PROMPT + split, 8)],
        need_logits=False,
    )
    again = engine.generate(
        pieces, ASKED, PROMPT + split, dataclasses.replace(generation.config, reread=None)
    )
    assert list(again) == generation.tokens
    assert generation.end == PROMPT + len(written) + NEW - 1


def test_copies_are_what_stands_in_the_document() -> None:
    generation = answer(*prefilled(SMALL), ASKED, reread=make_one())
    written = np.array([*IDS[:PROMPT], *generation.question])
    for copy in generation.copies:
        assert DOCUMENT[0] <= copy.first < copy.last <= DOCUMENT[1]
        size = copy.last - copy.first
        assert (written[copy.at : copy.at + size] == IDS[copy.first : copy.last]).all()
        assert written[copy.at - 1] == 3
    assert list(generation.question[:3]) == [1, 2, 3]
    assert sum(copy.last - copy.first for copy in generation.copies) <= 24
    assert len(generation.question) - QUESTION <= make_one().room


def test_it_goes_where_the_turn_begins() -> None:
    generation = answer(*prefilled(SMALL), ASKED, reread=make_one(), reread_at=5)
    assert list(generation.question[:5]) == ASKED[:5]
    assert list(generation.question[5:8]) == [1, 2, 3]
    assert list(generation.question[-15:]) == ASKED[5:]


def test_nothing_is_read_again_where_everything_is_attended() -> None:
    generation = answer(*prefilled(COVERING), ASKED, reread=make_one(), reread_at=5)
    assert (list(generation.question), generation.copies) == (ASKED, ())
    assert generation.tokens == answer(*prefilled(COVERING), ASKED).tokens


def test_the_prompts_own_keys_and_values_stay_as_they_are() -> None:
    engine, pieces = prefilled(SMALL)
    before = [pieces[0].keys(layer).copy() for layer in range(2)]
    answer(engine, pieces, ASKED, reread=make_one())
    assert all(np.array_equal(pieces[0].keys(layer), before[layer]) for layer in range(2))


def test_a_second_question_finds_what_it_would_have_found_first() -> None:
    engine, pieces = prefilled(SMALL)
    shared = make_one()
    answer(engine, pieces, ASKED[::-1], reread=shared)
    second = answer(engine, pieces, ASKED, reread=shared)
    first = answer(*prefilled(SMALL), ASKED, reread=make_one())
    assert (second.question, second.tokens) == (first.question, first.tokens)


def test_attention_to_a_copy_counts_for_what_it_repeats() -> None:
    engine, pieces = prefilled(SMALL)
    question = ASKED[:8]  # one chunk, so that what stands before it is local
    generation = answer(engine, pieces, question, reread=make_one(), keep_queries=True)
    assert generation.log is not None

    def paid(copies: tuple[Copy, ...]) -> torch.Tensor:
        assert generation.log is not None
        return look(
            engine.runner, generation.cache, generation.log, DOCUMENT,
            question_chunk_size=8, copies=copies,
        ).attention  # fmt: skip

    alone, together = paid(()), paid(tuple(generation.copies))
    gained = together - alone
    inside = torch.zeros(DOCUMENT[1] - DOCUMENT[0], dtype=torch.bool)
    for copy in generation.copies:
        inside[copy.first - DOCUMENT[0] : copy.last - DOCUMENT[0]] = True
    assert float(gained[inside].sum()) > 0.01
    assert float(gained[~inside].abs().max()) == 0


def test_stretches_lie_around_the_densest_places_in_order() -> None:
    looked, none = torch.zeros(200), torch.zeros(200)
    looked[150], looked[20:23] = 5.0, 1.0
    assert choose_stretches(looked, none, 1) == [(146, 154)]
    assert choose_stretches(looked, none, 2) == [(17, 25), (146, 154)]
    looked[150] = 0.0
    assert choose_stretches(looked, none, 1) == [(17, 25)]


def test_a_peak_is_used_up_once_it_is_read() -> None:
    looked, none = torch.zeros(300), torch.zeros(300)
    looked[100], looked[250] = 5.0, 4.0
    assert choose_stretches(looked, none, 6) == [(96, 104), (246, 254)]


@pytest.mark.parametrize("size", [1, 7, 8])
def test_a_document_as_short_as_a_stretch_is_repeated_whole(size: int) -> None:
    assert choose_stretches(torch.ones(size), torch.zeros(size), 3) == [(0, size)]


def test_what_nobody_looks_at_is_not_read_again() -> None:
    assert choose_stretches(torch.zeros(50), torch.zeros(50), 3) == []


def test_the_questions_own_words_get_a_stretch() -> None:
    looked = torch.zeros(100)
    looked[10] = 1.0
    words = torch.zeros(100)
    words[80] = 1.0
    assert any(low <= 80 < high for low, high in choose_stretches(looked, words, 2))


def test_a_place_that_the_question_quotes_is_read_alone() -> None:
    looked, quoted = torch.zeros(300), torch.zeros(300)
    looked[10], looked[100] = 5.0, 4.0
    question = np.arange(1000, 1012, dtype=np.int32)
    ids = np.arange(300, dtype=np.int32)
    ids[200:212] = question
    quoted = torch.from_numpy(repeated_words(ids, question))
    ((low, high),) = choose_stretches(looked, quoted, 4)
    assert low <= 204 < high
    ids[250:262] = question  # two places: no quotation of either
    several = torch.from_numpy(repeated_words(ids, question))
    assert len(choose_stretches(looked, several, 4)) > 1


def test_rare_runs_of_the_question_are_found_and_common_ones_count_less() -> None:
    ids = np.array([1, 2, 3, 4, 9, 9, 5, 6, 7, 8, 0, 5, 6, 7, 8, 9], dtype=np.int32)
    question = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8], dtype=np.int32)
    scores = repeated_words(ids, question)
    assert scores[0] == 1.0
    assert (scores[6], scores[11]) == (0.25, 0.25)
    assert np.count_nonzero(scores) == 3
    assert not repeated_words(ids, question[:3]).any()
    assert not repeated_words(ids[:3], question).any()
