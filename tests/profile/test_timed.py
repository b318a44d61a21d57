"""Marks change nothing: the wrapped engine gives the same K, V and tokens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.engine.test_small_budget import SMALL
from tests.tiny_models import make_engine, make_oracle, memory_piece, token_ids
from tsdoc.engine.engine import Engine
from tsdoc.engine.generate import GenerationConfig
from tsdoc.kernels.timing import HostTimer
from tsdoc.profile.timed import Recorder, TimedBackend, TimedDecoder


@pytest.mark.parametrize("sets", ["one", "per_kv_head"])
def test_the_engine_does_the_same_with_marks(sets: str) -> None:
    selection = dataclasses.replace(SMALL, sets=sets)  # type: ignore[arg-type]
    plain = make_engine(make_oracle("qwen2", seed=4), selection)
    recorder = Recorder(HostTimer())
    timed = Engine(
        TimedDecoder(plain.runner.decoder, recorder),
        selection,
        max_tokens=4096,
        question_chunk_size=selection.chunk_size,
        backend=TimedBackend(plain.backend, recorder),
    )
    ids = token_ids(200, seed=5)
    options = GenerationConfig(
        max_new_tokens=8, stop_ids=frozenset(), question_chunk_size=16, theta=0.9
    )
    pieces, answers = [], []
    for engine in (plain, timed):
        piece = memory_piece(engine, 260)
        with recorder.recording():
            engine.prefill([piece], ids[:180], 0, prefill_block=64, on_block=lambda end: None)
        pieces.append(piece)
        answers.append(list(engine.generate([piece], ids[180:].tolist(), 180, options)))
    assert answers[0] == answers[1]
    for layer in range(plain.runner.decoder.config.num_layers):
        np.testing.assert_array_equal(pieces[0].keys(layer), pieces[1].keys(layer))
        np.testing.assert_array_equal(pieces[0].values(layer), pieces[1].values(layer))
    assert [end for end, _ in recorder.borders] == [0, 64, 128, 180]
    assert {part for part, *_ in recorder.spans} == {"linear", "store", "selection", "attention"}


def test_nothing_is_recorded_outside() -> None:
    recorder = Recorder(HostTimer())
    with recorder.span("linear"):
        pass
    recorder.border(10)
    assert (recorder.spans, recorder.borders) == ([], [])
