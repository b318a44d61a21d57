"""Decode steps at a long context."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.bench_gpu.common import DEVICE, PAPER, Row, fill, graph_ms, make_engine, pool_of
from tsdoc.engine.engine import Engine
from tsdoc.engine.fused_decoder import FusedDecoder
from tsdoc.engine.generate import GenerationConfig
from tsdoc.engine.selection_cache import SelectionCache
from tsdoc.kernels.interface import DeviceDecode
from tsdoc.kernels.kv import DevicePiece


def timed_answer(
    engine: Engine, piece: DevicePiece, start: int, config: GenerationConfig
) -> tuple[list[float], SelectionCache | DeviceDecode]:
    """Milliseconds of each token of an answer, the question's with the first."""
    times, last = [], time.perf_counter()
    generation = engine.generate([piece], list(range(20)), start, config)
    for _ in generation:
        now = time.perf_counter()
        times.append((now - last) * 1e3)
        last = now
    return times, generation.reuse


def decode(decoder: FusedDecoder, num_tokens: int, count: int = 24) -> list[Row]:
    """Milliseconds per token: every layer selects, every layer hits, full attention."""
    engine = make_engine(decoder, PAPER, num_tokens + 4096)
    piece = DevicePiece(start=0, capacity=num_tokens + 256)
    engine.cache([piece])
    pool = pool_of(engine)
    fill(pool)
    pool.resident = num_tokens
    rows: list[Row] = []
    for name, theta in (("every layer selects", None), ("every layer hits", -1.0)):
        config = GenerationConfig(
            max_new_tokens=count, stop_ids=frozenset(), question_chunk_size=512, theta=theta
        )
        first, _ = timed_answer(engine, piece, num_tokens, config)
        times, reuse = timed_answer(engine, piece, num_tokens, config)
        rows.append(
            {
                "what": f"decode, {name}", "tokens": num_tokens,
                "p50_ms": float(np.median(times[4:])),
                "p95_ms": float(np.quantile(times[4:], 0.95)),
                "hits": reuse.num_hits, "lookups": reuse.num_lookups,
                "first_answer_ms": [round(t, 1) for t in first[:4]],
                "next_answer_ms": [round(t, 1) for t in times[:4]],
            }
        )  # fmt: skip

    ids = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    @torch.inference_mode()
    def full_step() -> torch.Tensor:
        hidden = decoder.embed(ids)
        for layer in range(decoder.config.num_layers):
            q, _, _ = decoder.project(layer, hidden)
            k, v = (t[layer][:num_tokens] for t in (pool.keys, pool.values))
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            hidden = decoder.finish_layer(layer, hidden, out[0].transpose(0, 1))
        return decoder.logits(hidden)

    full = graph_ms(full_step, 7)
    rows.append({"what": "decode, full attention", "tokens": num_tokens, "p50_ms": full})
    return rows
