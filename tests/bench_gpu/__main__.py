"""Figures of the CUDA backend, each beside a ceiling or full attention measured on the spot.

    python -m tests.bench_gpu ceilings attention decode prefill transfer store load trade equal \
        index index_decode out_of_core host_steps weights

Shape of Qwen2-7B, random weights, bfloat16; times are medians in milliseconds. FlashInfer is
measured beside it where it is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.bench_gpu.attention import attention
from tests.bench_gpu.common import DEVICE, QWEN2_7B, Row, make_model, median_ms
from tests.bench_gpu.decode import decode
from tests.bench_gpu.host_steps import host_steps
from tests.bench_gpu.index import decode as index_decode
from tests.bench_gpu.index import index
from tests.bench_gpu.load import load
from tests.bench_gpu.out_of_core import out_of_core
from tests.bench_gpu.prefill import prefill, store, trade, transfer
from tests.bench_gpu.weights import weights
from tsdoc.engine.decoder import Decoder
from tsdoc.engine.engine import Engine
from tsdoc.engine.fused_decoder import FusedDecoder
from tsdoc.engine.generate import GenerationConfig
from tsdoc.engine.random_weights import RandomWeights
from tsdoc.kernels.kv import MemoryPiece
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.triton_backend import TritonBackend

SMALL = dataclasses.replace(
    QWEN2_7B, num_layers=3, hidden_size=256, intermediate_size=512, num_qo_heads=6, num_kv_heads=2,
    head_dim=64, vocab_size=4096,
)  # fmt: skip


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
        piece = MemoryPiece(
            start=0, capacity=6200, num_layers=SMALL.num_layers, num_kv_heads=SMALL.num_kv_heads,
            head_dim=SMALL.head_dim, kv_dtype="float32",
        )  # fmt: skip
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


def show(row: Row) -> None:
    cells = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
    sys.stdout.write("  ".join(cells) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+")
    parser.add_argument("--tokens", type=int, default=1_048_576)
    parser.add_argument("--block", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--cap", type=int, default=24_000_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens, block, chunk = options.tokens, options.block, options.chunk
    whole: dict[str, Callable[[FusedDecoder], list[Row]]] = {
        "prefill": lambda decoder: prefill(decoder, tokens, block, chunk),
        "decode": lambda decoder: decode(decoder, tokens),
        "transfer": lambda decoder: transfer(decoder, min(tokens, 131_072)),
        "store": lambda decoder: store(decoder, min(tokens, 262_144), block),
        "trade": lambda decoder: trade(decoder, tokens),
        "out_of_core": lambda decoder: out_of_core(decoder, tokens, block, options.cap),
        "host_steps": lambda decoder: host_steps(decoder, tokens, options.cap),
        "index_decode": lambda decoder: index_decode(decoder, tokens),
    }
    single: dict[str, Callable[[], list[Row]]] = {
        "ceilings": ceilings,
        "attention": lambda: [
            row for length in (131_072, tokens) for row in attention(length, chunk)
        ],
        "equal": equal,
        "index": lambda: index(tokens),
        "load": lambda: load(min(tokens, 262_144)),
        "weights": weights,
    }
    unknown = set(options.parts) - whole.keys() - single.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    rows: list[Row] = []
    decoder = make_model() if whole.keys() & set(options.parts) else None
    for part in options.parts:
        new = single[part]() if decoder is None or part in single else whole[part](decoder)
        gc.collect()
        torch.cuda.empty_cache()
        rows += new
        for row in new:
            show(row)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
