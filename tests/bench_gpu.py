"""Figures of the CUDA backend, each beside a ceiling or full attention measured on the spot.

    python -m tests.bench_gpu ceilings attention prefill decode transfer equal [--json FILE]

Qwen2-7B's shape with random weights in bfloat16; times are medians in milliseconds. FlashInfer is
measured beside it where it is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tsdoc.engine.decoder import Decoder
from tsdoc.engine.engine import Engine
from tsdoc.engine.fused_decoder import FusedDecoder
from tsdoc.engine.generate import GenerationConfig
from tsdoc.engine.random_weights import RandomWeights
from tsdoc.kernels.kv import MemoryPiece
from tsdoc.kernels.rope import make_rope_table
from tsdoc.kernels.selection import SelectionConfig, chunk_range
from tsdoc.kernels.triton_backend import TritonBackend
from tsdoc.models.config import ModelConfig, RopeConfig

QWEN2_7B = ModelConfig(
    architecture="qwen2", num_layers=28, hidden_size=3584, intermediate_size=18944,
    num_qo_heads=28, num_kv_heads=4, head_dim=128, vocab_size=152_064, norm_eps=1e-6,
    rope=RopeConfig(rope_type="default", theta=1e6), window=32_768, tie_embeddings=False,
    qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False, eos_token_ids=(),
)  # fmt: skip
SMALL = dataclasses.replace(
    QWEN2_7B, num_layers=3, hidden_size=256, intermediate_size=512, num_qo_heads=6, num_kv_heads=2,
    head_dim=64, vocab_size=4096,
)  # fmt: skip
DEVICE = torch.device("cuda")
PAPER = SelectionConfig()
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


def ceilings() -> list[Row]:
    x = torch.randn(1 << 29, dtype=torch.bfloat16, device=DEVICE)
    y = torch.empty_like(x)
    copy = median_ms(lambda: y.copy_(x))
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    product = median_ms(lambda: a @ b)
    return [
        {"what": "copy_TB_per_s", "value": 4 * x.numel() / copy / 1e9},
        {"what": "bf16_TFLOP_per_s", "value": 2 * 8192**3 / product / 1e9},
    ]


def one_layer(num_tokens: int) -> tuple[TritonBackend, MemoryPiece]:
    """A backend of one layer whose pool is full of random K and V."""
    config = dataclasses.replace(QWEN2_7B, num_layers=1)
    backend = TritonBackend(
        config, kv_dtype="bfloat16", compute_dtype=torch.bfloat16, device=DEVICE, copy_back=False
    )
    return backend, make_piece(config, num_tokens)


def make_piece(config: ModelConfig, capacity: int, kv_dtype: str = "bfloat16") -> MemoryPiece:
    return MemoryPiece(
        start=0, capacity=capacity, num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, kv_dtype=kv_dtype,
    )  # fmt: skip


def attention(length: int, chunk: int) -> list[Row]:
    """The attention work of one chunk in one layer, as the engine does it, 8,192 tokens at once."""
    backend, piece = one_layer(length + 8192)
    rope = make_rope_table(QWEN2_7B.rope, 128, 4096, DEVICE)
    config = dataclasses.replace(PAPER, chunk_size=chunk)
    cache = backend.cache([piece], rope, config)
    keys, values = backend.pool.keys[0].normal_(), backend.pool.values[0].normal_()
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
    row: Row = {
        "what": f"attention work per chunk of {chunk}",
        "tokens": length,
        "total_ms": median_ms(work) * share,
        "queries_ms": graph_ms(make_queries) * share,
        "select_ms": graph_ms(lambda: cache.select(0, queries, ranges)) * share,
        "attend_ms": graph_ms(attend) * share,
    }
    for name, value in full_attention(q[:512], keys[:length], values[:length]).items():
        row[name] = value
        row[name.replace("_ms", "_times")] = value / (row["total_ms"] * 512 / chunk)
    return [row]


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, float]:
    """Fused attention of the chunk over all tokens before it, without a mask."""
    out = {}
    heads = [t.transpose(0, 1)[None] for t in (q, k, v)]
    for name, kind in (
        ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ("flash", SDPBackend.FLASH_ATTENTION),
    ):
        with sdpa_kernel(kind):
            out[f"full_{name}_ms"] = median_ms(
                lambda: F.scaled_dot_product_attention(*heads, enable_gqa=True), 7
            )
    try:
        import flashinfer
    except ImportError:
        return out
    for kind in ("fa3", "fa2"):
        space = torch.empty(512 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=kind)
        borders = [torch.tensor([0, n], dtype=torch.int32) for n in (q.shape[0], k.shape[0])]
        slots = torch.arange(k.shape[0], dtype=torch.int32, device=DEVICE)
        last = torch.ones(1, dtype=torch.int32)
        wrapper.plan(
            borders[0], borders[1], slots, last, 28, 4, 128, 1, causal=True,
            q_data_type=q.dtype, kv_data_type=k.dtype,
        )  # fmt: skip
        paged = (k.unsqueeze(1), v.unsqueeze(1))
        run = functools.partial(wrapper.run, q, paged)
        out[f"flashinfer_{kind}_ms"] = median_ms(run, 7)
    return out


def make_model(config: ModelConfig = QWEN2_7B) -> FusedDecoder:
    weights = RandomWeights(config, torch.bfloat16, DEVICE)
    return FusedDecoder(config, weights, torch.bfloat16, DEVICE)


def make_engine(
    decoder: FusedDecoder, config: SelectionConfig, max_tokens: int, *, copy_back: bool = False
) -> Engine:
    backend = TritonBackend(
        decoder.config, kv_dtype="bfloat16", compute_dtype=torch.bfloat16, device=DEVICE,
        copy_back=copy_back,
    )  # fmt: skip
    return Engine(decoder, config, max_tokens=max_tokens, question_chunk_size=512, backend=backend)


def prefill(decoder: FusedDecoder, num_tokens: int, block: int, chunk: int) -> list[Row]:
    torch.cuda.reset_peak_memory_stats()
    engine = make_engine(decoder, dataclasses.replace(PAPER, chunk_size=chunk), num_tokens)
    ids = np.random.default_rng(0).integers(0, 150_000, num_tokens).astype(np.int32)
    pieces = [make_piece(decoder.config, num_tokens)]
    warm_up = ids[: min(num_tokens, 3 * block)]
    engine.prefill(pieces, warm_up, 0, prefill_block=block, on_block=lambda end: None)
    torch.cuda.synchronize()
    begun, marks = time.perf_counter(), []

    def on_block(end: int) -> None:
        marks.append((end, time.perf_counter() - begun))

    engine.prefill(pieces, ids, 0, prefill_block=block, on_block=on_block)
    torch.cuda.synchronize()
    total = time.perf_counter() - begun
    row: Row = {
        "what": f"prefill, block {block}, chunk {chunk}",
        "tokens": num_tokens,
        "total_s": total,
        "tokens_per_s": num_tokens / total,
        "peak_GB": torch.cuda.max_memory_allocated() / 1e9,
        "finite": bool(
            engine.backend.pool.keys[-1][num_tokens - 4096 : num_tokens].isfinite().all()
        ),
    }
    row |= {f"at_{end // 1024}k_s": t for end, t in marks if end in (131_072, 524_288)}
    return [row]


def decode(decoder: FusedDecoder, num_tokens: int, count: int = 24) -> list[Row]:
    """Milliseconds per token: every layer selects, every layer hits, full attention."""
    engine = make_engine(decoder, PAPER, num_tokens + 4096)
    piece = make_piece(decoder.config, num_tokens + 256)
    engine.cache([piece])
    pool = engine.backend.pool
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    pool.resident = num_tokens
    rows: list[Row] = []
    for name, theta in (("every layer selects", None), ("every layer hits", -1.0)):
        config = GenerationConfig(
            max_new_tokens=count, stop_ids=frozenset(), question_chunk_size=512, theta=theta
        )
        times, last = [], time.perf_counter()
        generation = engine.generate([piece], list(range(20)), num_tokens, config)
        for _ in generation:
            now = time.perf_counter()
            times.append((now - last) * 1e3)
            last = now
        rows.append(
            {
                "what": f"decode, {name}", "tokens": num_tokens, "question_ms": times[0],
                "p50_ms": float(np.median(times[4:])),
                "p95_ms": float(np.quantile(times[4:], 0.95)),
                "hits": generation.reuse.num_hits, "lookups": generation.reuse.num_lookups,
            }
        )  # fmt: skip

    ids = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    @torch.inference_mode()
    def full_step() -> torch.Tensor:
        hidden = decoder.embed(ids)
        for layer in range(decoder.config.num_layers):
            q, _, _ = decoder.project(layer, hidden)
            k, v = (t[layer][:num_tokens] for t in (pool.keys, pool.values))
            heads = [t.transpose(0, 1)[None] for t in (q, k, v)]
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                out = F.scaled_dot_product_attention(*heads, enable_gqa=True)
            hidden = decoder.finish_layer(layer, hidden, out[0].transpose(0, 1))
        return decoder.logits(hidden)

    full = graph_ms(full_step, 7)
    rows.append({"what": "decode, full attention", "tokens": num_tokens, "p50_ms": full})
    return rows


def transfer(decoder: FusedDecoder, num_tokens: int) -> list[Row]:
    """Prefill with K and V copied to host memory behind it, and the way back."""
    ids = np.random.default_rng(0).integers(0, 150_000, num_tokens).astype(np.int32)
    rows: list[Row] = []
    piece = make_piece(decoder.config, num_tokens)
    size = 2 * decoder.config.num_layers * piece.keys(0).nbytes
    for copy_back in (False, True):
        engine = make_engine(decoder, PAPER, num_tokens, copy_back=copy_back)
        for _ in range(2):  # the first touches the host's pages
            begun = time.perf_counter()
            engine.prefill([piece], ids, 0, prefill_block=8192, on_block=lambda end: None)
            torch.cuda.synchronize()
            total = time.perf_counter() - begun
        what = f"prefill, {'copied to' if copy_back else 'not in'} host memory"
        rows.append({"what": what, "tokens": num_tokens, "total_s": total, "GB": size / 1e9})
    engine.backend.pool.resident = 0
    begun = time.perf_counter()
    engine.cache([piece]).load(num_tokens)
    total = time.perf_counter() - begun
    return [
        *rows,
        {"what": "load from host memory", "total_s": total, "GB_per_s": size / total / 1e9},
    ]


def equal() -> list[Row]:
    """Greedy tokens of a small random model in float32, CPU beside CUDA, 6,000 tokens."""
    weights = dict(RandomWeights(SMALL, torch.float32, qk_gain=12.0).items())
    config = SelectionConfig(n_init=64, n_local=256, top_k=512, chunk_size=256)
    ids = np.random.default_rng(1).integers(0, 4096, 6100).astype(np.int32)
    answers, keys = [], []
    for device in (torch.device("cpu"), DEVICE):
        if device.type == "cpu":
            engine = Engine(
                Decoder(SMALL, weights, torch.float32), config, max_tokens=8192,
                question_chunk_size=256,
            )  # fmt: skip
        else:
            backend = TritonBackend(
                SMALL, kv_dtype="float32", compute_dtype=torch.float32, device=device
            )
            decoder = FusedDecoder(SMALL, weights, torch.float32, device)
            engine = Engine(
                decoder, config, max_tokens=8192, question_chunk_size=256, backend=backend
            )
        piece = make_piece(SMALL, 6200, "float32")
        engine.prefill([piece], ids[:6000], 0, prefill_block=2048, on_block=lambda end: None)
        options = GenerationConfig(
            max_new_tokens=48, stop_ids=frozenset(), question_chunk_size=256, theta=0.9
        )
        answers.append(list(engine.generate([piece], ids[6000:].tolist(), 6000, options)))
        keys.append(piece.keys(2)[:6000])
    return [
        {
            "what": "float32, CPU beside CUDA",
            "equal_tokens": sum(a == b for a, b in zip(*answers, strict=True)),
            "of": len(answers[0]),
            "largest_difference_of_K": float(np.abs(keys[0] - keys[1]).max()),
        }
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--tokens", type=int, default=1_048_576)
    parser.add_argument("--block", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    decoder = make_model() if {"prefill", "decode", "transfer"} & set(options.parts) else None
    for part in options.parts:
        if part == "ceilings":
            new = ceilings()
        elif part == "attention":
            lengths = (131_072, options.tokens)
            new = [row for length in lengths for row in attention(length, options.chunk)]
        elif part == "equal":
            new = equal()
        elif part == "transfer":
            new = transfer(decoder, min(options.tokens, 131_072))
        elif part == "prefill":
            new = prefill(decoder, options.tokens, options.block, options.chunk)
        else:
            new = decode(decoder, options.tokens)
        torch.cuda.empty_cache()
        rows += new
        for row in new:
            cells = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
            sys.stdout.write("  ".join(cells) + "\n")
            sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
