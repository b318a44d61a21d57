"""Timing, shapes and engines that the parts share."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import torch

from tsdoc.engine.engine import Engine
from tsdoc.engine.fused_decoder import FusedDecoder
from tsdoc.engine.random_weights import RandomWeights
from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.triton_backend import TritonBackend
from tsdoc.models.config import ModelConfig, RopeConfig
from tsdoc.store.key import KVShape, ModelKey

QWEN2_7B = ModelConfig(
    architecture="qwen2", num_layers=28, hidden_size=3584, intermediate_size=18944,
    num_qo_heads=28, num_kv_heads=4, head_dim=128, vocab_size=152_064, norm_eps=1e-6,
    rope=RopeConfig(rope_type="default", theta=1e6), window=32_768, tie_embeddings=False,
    qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False, eos_token_ids=(),
)  # fmt: skip
DEVICE = torch.device("cuda")
PAPER = SelectionConfig()
# What K and V of these random weights are kept under.
SHAPE = KVShape(
    num_layers=QWEN2_7B.num_layers, num_kv_heads=QWEN2_7B.num_kv_heads, head_dim=QWEN2_7B.head_dim,
    kv_dtype="bfloat16",
)  # fmt: skip
KEY = ModelKey(
    model="random", rope=QWEN2_7B.rope.fields(), kv_dtype="bfloat16", compute_dtype="bfloat16",
    **dataclasses.asdict(PAPER),
)  # fmt: skip
Row = dict[str, object]


def median_ms(call: Callable[[], object], count: int = 20) -> float:
    """Median over `count` calls, each between two events on a queue that never runs dry."""
    call()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda._sleep(20_000_000)  # the host gets ahead of the device
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return float(np.median(times))


def graph_ms(call: Callable[[], object], count: int = 20) -> float:
    """Like `median_ms`, of a captured graph: without the host's part."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return median_ms(graph.replay, count)


def make_model(config: ModelConfig = QWEN2_7B) -> FusedDecoder:
    weights = RandomWeights(config, torch.bfloat16, DEVICE)
    return FusedDecoder(config, weights, torch.bfloat16, DEVICE)


def make_backend(config: ModelConfig) -> TritonBackend:
    return TritonBackend(config, kv_dtype="bfloat16", compute_dtype=torch.bfloat16, device=DEVICE)


def make_engine(decoder: FusedDecoder, config: SelectionConfig, max_tokens: int) -> Engine:
    return Engine(
        decoder, config, max_tokens=max_tokens, question_chunk_size=512,
        backend=make_backend(decoder.config),
    )  # fmt: skip


def pool_of(engine: Engine) -> PagePool:
    """What `make_engine`'s engine keeps K and V in."""
    assert isinstance(engine.backend, TritonBackend)
    return engine.backend.pool


def fill(pool: PagePool) -> None:
    """Random K and V."""
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()


def random_ids(num_tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 150_000, num_tokens).astype(np.int32)
