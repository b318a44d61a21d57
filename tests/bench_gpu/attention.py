"""Attention work of one chunk in one layer, beside full attention."""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.bench_gpu.common import (
    DEVICE,
    PAPER,
    QWEN2_7B,
    Row,
    fill,
    graph_ms,
    make_backend,
    median_ms,
)
from tsdoc.kernels.kv import DevicePiece
from tsdoc.kernels.rope import make_rope_table
from tsdoc.kernels.selection import chunk_range


def attention(length: int, chunk: int) -> list[Row]:
    """The attention work of one chunk in one layer, as the engine does it, 8,192 tokens at once."""
    backend = make_backend(dataclasses.replace(QWEN2_7B, num_layers=1))
    piece = DevicePiece(start=0, capacity=length + 8192)
    rope = make_rope_table(QWEN2_7B.rope, 128, 4096, DEVICE)
    config = dataclasses.replace(PAPER, chunk_size=chunk)
    cache = backend.cache([piece], rope, config)
    fill(backend.pool)
    keys, values = backend.pool.keys[0], backend.pool.values[0]
    ranges = [chunk_range(s, s + chunk, config) for s in range(length, length + 8192, chunk)]
    q = torch.randn(8192, 28, 128, dtype=torch.bfloat16, device=DEVICE)

    def make_queries() -> torch.Tensor:
        return cache.selection_queries(q, ranges)

    queries = make_queries()
    selected = cache.select(0, queries, ranges)

    def attend() -> torch.Tensor:
        return cache.attend_chunks(0, q, selected, ranges)

    def work() -> torch.Tensor:
        return cache.attend_chunks(0, q, cache.select(0, make_queries(), ranges), ranges)

    share = 1 / len(ranges)
    total_ms = graph_ms(work) * share
    row: Row = {
        "what": f"attention work per chunk of {chunk}",
        "tokens": length,
        "total_ms": total_ms,
        "queries_ms": graph_ms(make_queries) * share,
        "select_ms": graph_ms(lambda: cache.select(0, queries, ranges)) * share,
        "attend_ms": graph_ms(attend) * share,
    }
    for name, value in full_attention(q[:512], keys[:length], values[:length]).items():
        row[name] = value
        row[name.replace("_ms", "_times")] = value / (total_ms * 512 / chunk)
    return [row]


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, float]:
    """Fused attention of the chunk over all tokens before it, without a mask."""
    out = {}
    query, keys, values = (t.transpose(0, 1)[None] for t in (q, k, v))
    for name, kind in (
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("flash", SDPBackend.FLASH_ATTENTION),
    ):
        with sdpa_kernel(kind):
            out[f"full_{name}_ms"] = median_ms(
                lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True), 7
            )
    try:
        import flashinfer
    except ImportError:
        return out
    space = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa3")
    borders = [torch.tensor([0, n], dtype=torch.int32) for n in (q.shape[0], k.shape[0])]
    slots = torch.arange(k.shape[0], dtype=torch.int32, device=DEVICE)
    last = torch.ones(1, dtype=torch.int32)
    wrapper.plan(
        borders[0], borders[1], slots, last, q.shape[1], k.shape[1], q.shape[2], 1, causal=True,
        q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    paged = (k.unsqueeze(1), v.unsqueeze(1))
    run = functools.partial(wrapper.run, q, paged)
    out["full_flashinfer_fa3_ms"] = median_ms(run, 7)
    exact = F.scaled_dot_product_attention(
        query[:, :, -1:], keys, values, enable_gqa=True
    )  # the last query sees all tokens, under a causal mask too
    error = (run()[-1] - exact[0, :, 0]).norm() / exact.norm()
    out["flashinfer_error"] = float(error)
    return out
