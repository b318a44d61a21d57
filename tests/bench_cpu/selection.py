"""Times one selection on the CPU, of a step of an answer: exactly, and by the key index.

    python -m tests.bench_cpu.selection [--tokens 103044] [--threads 1] [--heads 14 2 64]

Keys are made up; both ways take turns, over several layers as in an answer, so that what is read
has been in memory, but not in the processor's cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch

from tsdoc.kernels.index_use import IndexConfig, IndexWatch
from tsdoc.kernels.kv import MemoryPiece
from tsdoc.kernels.rope import make_rope_table
from tsdoc.kernels.selection import SelectionConfig, chunk_range
from tsdoc.kernels.torch_cache import TorchCache
from tsdoc.kernels.torch_index import make_layer_index
from tsdoc.models.config import RopeConfig

LAYERS = 6
NEVER = 1 << 40


def made_keys(count: int, num_kv: int, head_dim: int, seed: int) -> torch.Tensor:
    """Keys near a subspace and off the origin, as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    decay = 0.9 ** torch.arange(head_dim)
    axes = torch.linalg.qr(torch.randn(num_kv, head_dim, head_dim, generator=generator))[0]
    centre = torch.randn(num_kv, head_dim, generator=generator)
    noise = torch.randn(count, num_kv, head_dim, generator=generator) * decay * 6
    return torch.einsum("nkr,krd->nkd", noise, axes) + centre


class Made:
    """One prompt of several layers, with caches that select exactly or by the index."""

    def __init__(self, count: int, num_heads: int, num_kv: int, head_dim: int) -> None:
        self.config = SelectionConfig()
        piece = MemoryPiece(
            start=0, capacity=count, num_layers=LAYERS, num_kv_heads=num_kv, head_dim=head_dim,
            kv_dtype="bfloat16",
        )  # fmt: skip
        indexes = []
        for layer in range(LAYERS):
            keys = made_keys(count, num_kv, head_dim, layer).bfloat16()
            piece.keys(layer)[:] = keys.view(torch.uint16).numpy()
            indexes.append(make_layer_index(keys))
        piece.set_index(indexes)
        rope = make_rope_table(RopeConfig(rope_type="default", theta=1e6), head_dim, 8192)
        self.caches: dict[str, TorchCache] = {}
        for candidates in (0.0, 1.0, IndexConfig().few, 2.0, 3.0):
            watch = None
            if candidates:
                config = IndexConfig(few=candidates, sample=NEVER)
                watch = IndexWatch(config)
                for layer in range(LAYERS):
                    watch.note(layer, 1.0)  # else first selections would be made both ways
            name = f"index, {candidates:g} · top_k" if candidates else "exact"
            self.caches[name] = TorchCache(
                [piece], rope, self.config, num_kv_heads=num_kv, index=watch
            )
        self.query = torch.randn(1, num_heads, head_dim, generator=torch.Generator().manual_seed(1))
        self.around = chunk_range(count - 1, count, self.config)

    def selection_ms(self, name: str, layer: int) -> float:
        begun = time.perf_counter()
        self.caches[name].select(layer, self.query, [self.around])
        return 1e3 * (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=103_044)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--heads", type=int, nargs=3, default=[14, 2, 64])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    made = Made(options.tokens, *options.heads)
    taken: dict[str, list[float]] = {name: [] for name in made.caches}
    with torch.inference_mode():
        for turn in range(options.repeat + 1):
            for layer in range(LAYERS):
                for name, times in taken.items():
                    ms = made.selection_ms(name, layer)
                    if turn:  # the first one finds its memory
                        times.append(ms)
    exact = statistics.median(taken["exact"])
    for name, times in taken.items():
        row = {
            "selection": name,
            "tokens": options.tokens,
            "threads": options.threads,
            "median_ms": round(statistics.median(times), 2),
            "least_ms": round(min(times), 2),
            "of_exact": round(statistics.median(times) / exact, 3),
        }
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
