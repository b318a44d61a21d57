"""The whole engine on a device equals the engine on the CPU, in float32."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.kernels.triton.cases import only_on_gpu
from tests.tiny_models import make_config, make_engine, make_oracle, memory_piece, token_ids
from tsdoc.engine.engine import Engine
from tsdoc.engine.evidence import look
from tsdoc.engine.fused_decoder import FusedDecoder
from tsdoc.engine.generate import Generation, GenerationConfig
from tsdoc.errors import ResourceError
from tsdoc.kernels.index_use import IndexConfig
from tsdoc.kernels.kv import MemoryPiece
from tsdoc.kernels.selection import SelectionConfig, VoteFunction
from tsdoc.kernels.triton_backend import TritonBackend

SMALL = SelectionConfig(n_init=4, n_local=12, top_k=10, chunk_size=16)
FEW_LAYERS: dict[str, Any] = {"num_hidden_layers": 2}  # the interpreter is slow
BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}


def make_device_engine(
    oracle: PreTrainedModel,
    config: SelectionConfig,
    device: torch.device,
    index: IndexConfig | None = None,
    memory_bytes: int | None = None,
) -> Engine:
    shape = make_config(oracle)
    decoder = FusedDecoder(shape, oracle.state_dict(), torch.float32, device)
    backend = TritonBackend(
        shape,
        kv_dtype="float32",
        compute_dtype=torch.float32,
        device=device,
        memory_bytes=memory_bytes,
    )
    return Engine(
        decoder, config, max_tokens=4096, question_chunk_size=16, backend=backend, index=index
    )


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
    return generation, piece.keys(engine.runner.decoder.config.num_layers - 1)[:split]


def test_an_answer_by_the_key_index_equals_the_exact_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all as candidates, until the answer itself has joined the index."""
    monkeypatch.setattr("tsdoc.kernels.index_use.WORTHWHILE", 0)
    oracle = make_oracle("qwen2", seed=21, **FEW_LAYERS)
    ids, count = token_ids(24, seed=22), 5
    config = dataclasses.replace(SMALL, n_local=2, top_k=6)
    exact, _ = answer(make_engine(oracle, config), ids, 16, None, count)
    engine = make_device_engine(oracle, config, device, IndexConfig(candidates=8))
    found, _ = answer(engine, ids, 16, None, count)
    assert engine.backend._parts.index.covered > len(ids)  # type: ignore[attr-defined]
    assert found.tokens == exact.tokens
    assert found.reuse.num_lookups == exact.reuse.num_lookups


@pytest.mark.parametrize("on_host", [False, True])
def test_layers_in_which_the_index_catches_too_little_select_exactly(
    device: torch.device, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known from an answer's first step, which is made both ways; the next answer is exact."""
    only_on_gpu(device, on_host)
    monkeypatch.setattr("tsdoc.kernels.index_use.WORTHWHILE", 0)
    # An index for which all keys are alike.
    monkeypatch.setattr(
        "tsdoc.kernels.triton_index.build",
        lambda read, basis, codes, *_, step: codes.fill_(0x77),
    )
    oracle = make_oracle("qwen2", seed=21, **FEW_LAYERS)
    ids, count = token_ids(40, seed=22), 3
    config = dataclasses.replace(SMALL, n_local=2, top_k=6)
    exact, _ = answer(make_engine(oracle, config), ids, 32, None, count)
    tokens = {}
    for floor, num_answers in ((0.0, 1), (2.0, 2)):
        engine = make_device_engine(oracle, config, device, IndexConfig(candidates=1, floor=floor))
        if on_host:
            engine.backend.pool.move_to_host()  # type: ignore[attr-defined]
        tokens[floor] = [answer(engine, ids, 32, None, count)[0].tokens for _ in range(num_answers)]
        watch = engine.index
        assert watch is not None
        assert watch.num_samples == (1 if on_host else num_answers) * 2  # layers
        assert watch.least_share is not None
        assert 0 < watch.least_share < 0.95
        assert [watch.is_trusted(layer) for layer in range(2)] == 2 * [floor == 0.0]
    assert tokens[2.0][1] == exact.tokens != tokens[0.0][0]


def test_with_a_cap_k_and_v_go_to_the_host_and_the_answer_is_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As planned: where the cap leaves room for stage, index and work, and not for K and V."""
    monkeypatch.setattr("tsdoc.kernels.index_use.WORTHWHILE", 0)
    monkeypatch.setattr("tsdoc.kernels.triton_backend.SPARE_TOKENS", 0)
    for module in ("memory_plan", "triton_backend"):
        monkeypatch.setattr(f"tsdoc.kernels.{module}.WORK_BYTES", 1000)
    monkeypatch.setattr("tsdoc.kernels.memory_plan.HOST_WORK_BYTES", 1000)
    cap = 250_000  # of 256 tokens 196,608 bytes of K and V, 65,536 of stage, 24,576 of index
    free = 190_000
    monkeypatch.setattr(
        "tsdoc.kernels.triton_backend.free_memory", lambda device, limit: (free, limit)
    )
    monkeypatch.setattr("tsdoc.kernels.triton_backend.limit_memory", lambda *arguments: None)
    oracle = make_oracle("qwen2", seed=21)
    ids, count = token_ids(24, seed=22), 2
    config = dataclasses.replace(SMALL, n_local=4, top_k=6)
    exact, _ = answer(make_engine(oracle, config), ids, 16, None, count)
    engine = make_device_engine(oracle, config, device, IndexConfig(candidates=8), cap)
    plan = engine.backend.memory_plan(26)  # type: ignore[attr-defined]
    assert (plan.on_host, plan.fits, plan.kv_bytes) == (True, True, 196_608)
    assert plan.needed_bytes == 60_000 + 65_536 + 24_576 + 1000
    found, _ = answer(engine, ids, 16, None, count)
    assert engine.backend.pool.on_host  # type: ignore[attr-defined]
    assert found.tokens == exact.tokens
    free -= 65_536 + 24_576  # by now stage and index are there; they grow with the prompt
    longer = engine.backend.memory_plan(300)  # type: ignore[attr-defined]
    assert longer.needed_bytes == 60_000 + 24_576 + 2 * 65_536 + 24_576 + 1000
    engine.cache([memory_piece(engine, 300)])
    assert engine.backend.pool.capacity == 512  # type: ignore[attr-defined]
    free = 90_000
    refused = make_device_engine(oracle, config, device, IndexConfig(candidates=8), cap)
    with pytest.raises(ResourceError, match="K and V of 26 tokens need"):
        answer(refused, ids, 16, None, count)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_prefill_and_answer_equal_the_cpu_engine(device: torch.device, family: str) -> None:
    if device.type == "cpu" and family != "qwen2":
        pytest.skip("the interpreter takes long")
    oracle = make_oracle(family, seed=21, **FEW_LAYERS, **(BIASED if family == "llama" else {}))
    ids = token_ids(58, seed=22)
    theta = 0.5 if family == "qwen2" else None
    cpu, cpu_keys = answer(make_engine(oracle, SMALL), ids, 48, theta, 4)
    gpu, gpu_keys = answer(make_device_engine(oracle, SMALL, device), ids, 48, theta, 4)
    np.testing.assert_allclose(gpu_keys, cpu_keys, atol=1e-3)
    assert gpu.tokens == cpu.tokens
    assert gpu.reuse.num_lookups == cpu.reuse.num_lookups
    assert gpu.reuse.num_hits == cpu.reuse.num_hits
    assert gpu.log is not None
    assert cpu.log is not None
    looked, expected = (
        look(g.runner, g.cache, log, (6, 44), question_chunk_size=16)
        for g, log in ((gpu, gpu.log), (cpu, cpu.log))
    )
    torch.testing.assert_close(looked.votes.cpu(), expected.votes, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(looked.attention, expected.attention, atol=1e-4, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("sets", ["one", "per_kv_head"])
@pytest.mark.parametrize("function", ["head_soft_vote", "head_vote", "topk"])
@pytest.mark.parametrize("smoothing", [1, 5])
def test_every_policy_equals_the_cpu_engine(
    sets: Literal["one", "per_kv_head"], function: VoteFunction, smoothing: int
) -> None:
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
