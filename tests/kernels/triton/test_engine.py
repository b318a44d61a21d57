"""The whole engine on a device equals the engine on the CPU, in float32."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.tiny_models import make_config, make_engine, make_oracle, memory_piece, token_ids
from tsdoc.engine.engine import Engine
from tsdoc.engine.evidence import look
from tsdoc.engine.fused_decoder import FusedDecoder
from tsdoc.engine.generate import Generation, GenerationConfig
from tsdoc.kernels.kv import MemoryPiece
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.triton_backend import TritonBackend

SMALL = SelectionConfig(n_init=4, n_local=12, top_k=10, chunk_size=16)
BIASED = {"attention_bias": True, "mlp_bias": True}


def make_device_engine(oracle: object, config: SelectionConfig, device: torch.device) -> Engine:
    shape = make_config(oracle)  # type: ignore[arg-type]
    decoder = FusedDecoder(shape, oracle.state_dict(), torch.float32, device)  # type: ignore[attr-defined]
    backend = TritonBackend(shape, kv_dtype="float32", compute_dtype=torch.float32, device=device)
    return Engine(decoder, config, max_tokens=4096, question_chunk_size=16, backend=backend)


def answer(
    engine: Engine,
    ids: np.ndarray,
    split: int,
    theta: float | None,
    count: int,
    piece: MemoryPiece | None = None,
) -> tuple[Generation, np.ndarray]:
    piece = piece or memory_piece(engine, len(ids) + count)
    ends: list[int] = []
    engine.prefill([piece], ids[:split], 0, prefill_block=32, on_block=ends.append)
    assert ends == [*range(32, split, 32), split]
    config = GenerationConfig(
        max_new_tokens=count,
        stop_ids=frozenset(),
        question_chunk_size=16,
        theta=theta,
        keep_queries=True,
    )
    generation = engine.generate([piece], ids[split:].tolist(), split, config)
    list(generation)
    return generation, piece.keys(2)[:split]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_prefill_and_answer_equal_the_cpu_engine(device: torch.device, family: str) -> None:
    if device.type == "cpu" and family != "qwen2":
        pytest.skip("the interpreter takes long")
    oracle = make_oracle(family, seed=21, **(BIASED if family == "llama" else {}))
    ids = token_ids(74, seed=22)
    theta = 0.5 if family == "qwen2" else None
    cpu, cpu_keys = answer(make_engine(oracle, SMALL), ids, 64, theta, 4)
    gpu, gpu_keys = answer(make_device_engine(oracle, SMALL, device), ids, 64, theta, 4)
    np.testing.assert_allclose(gpu_keys, cpu_keys, atol=1e-3)
    assert gpu.tokens == cpu.tokens
    assert gpu.reuse.num_lookups == cpu.reuse.num_lookups
    assert gpu.reuse.num_hits == cpu.reuse.num_hits
    assert gpu.log is not None
    assert cpu.log is not None
    looked, expected = (
        look(g.runner, g.cache, g.log, (6, 60), question_chunk_size=16) for g in (gpu, cpu)
    )
    torch.testing.assert_close(looked.votes.cpu(), expected.votes, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(looked.attention, expected.attention, atol=1e-4, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("sets", ["one", "per_kv_head"])
@pytest.mark.parametrize("function", ["head_soft_vote", "head_vote", "topk"])
@pytest.mark.parametrize("smoothing", [1, 5])
def test_every_policy_equals_the_cpu_engine(sets: str, function: str, smoothing: int) -> None:
    config = dataclasses.replace(SMALL, sets=sets, function=function, smoothing=smoothing)
    oracle = make_oracle("qwen2", seed=23)
    ids = token_ids(310, seed=24)
    # As long as all generated tokens are local: one that repeats an id ties with it in layer 0.
    cpu, cpu_keys = answer(make_engine(oracle, config), ids, 300, 0.5, 12)
    gpu, gpu_keys = answer(
        make_device_engine(oracle, config, torch.device("cuda")), ids, 300, 0.5, 12
    )
    np.testing.assert_allclose(gpu_keys, cpu_keys, atol=1e-3)
    assert gpu.tokens == cpu.tokens


@pytest.mark.gpu
def test_a_second_question_uses_the_pages_on_the_device() -> None:
    oracle = make_oracle("qwen2", seed=25)
    engine = make_device_engine(oracle, SMALL, torch.device("cuda"))
    ids = token_ids(80, seed=26)
    piece = memory_piece(engine, 100)
    engine.prefill([piece], ids[:64], 0, prefill_block=32, on_block=lambda end: None)
    piece.keys(0)[:64] = np.nan  # not read again
    config = GenerationConfig(
        max_new_tokens=2, stop_ids=frozenset(), question_chunk_size=16, theta=None
    )
    first = list(engine.generate([piece], ids[64:70].tolist(), 64, config))
    list(engine.generate([piece], ids[70:80].tolist(), 64, config))
    assert list(engine.generate([piece], ids[64:70].tolist(), 64, config)) == first
