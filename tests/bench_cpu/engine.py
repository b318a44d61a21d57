"""Times tsdoc's engine on the CPU: blocks of a prefill, decode steps, matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tests.bench_cpu.shapes import products
from tsdoc.engine.engine import Engine
from tsdoc.engine.forward import chunk_bounds
from tsdoc.engine.generate import GenerationConfig
from tsdoc.kernels.kv import KVPiece, MemoryPiece
from tsdoc.kernels.products import Linear, Products
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.workers import Workers
from tsdoc.models.config import ModelConfig
from tsdoc.models.locate import LocatedModel
from tsdoc.session.loading import load_model
from tsdoc.settings import EngineSettings, ParallelSettings

BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Decode steps behind one prompt: seconds of each, and the Selection Cache's share."""

    steps_s: tuple[float, ...]
    hit_ratio: float


class Runs:
    """One model.

    Args:
        model: Which.
        threads: CPU threads.
    """

    def __init__(self, model: LocatedModel, threads: int) -> None:
        settings = EngineSettings(threads=threads)
        loaded = load_model(model, settings, "float32", "cpu", ParallelSettings())
        self._config = model.config
        self._engine = Engine(
            loaded.decoder,
            SelectionConfig(),
            max_tokens=1 << 20,
            question_chunk_size=512,
            backend=loaded.backend,
            steps=loaded.steps,
        )

    def block_s(self, ids: npt.NDArray[np.int32], start: int, repeat: int) -> list[float]:
        """Seconds of the block [start, start + BLOCK) behind made-up K and V.

        What a block costs does not depend on their values.
        """
        piece = self._piece(start + BLOCK)
        filled = np.random.default_rng(0).standard_normal((4096, *piece.keys(0).shape[1:]))
        rows = torch.from_numpy(filled).bfloat16().view(torch.uint16).numpy()
        for layer in range(self._config.num_layers):
            for first in range(0, start, len(rows)):
                count = min(len(rows), start - first)
                piece.keys(layer)[first : first + count] = rows[:count]
                piece.values(layer)[first : first + count] = rows[:count]
        taken = []
        for _ in range(repeat):
            begun = time.perf_counter()
            self._engine.runner.run_chunks(
                self._engine.cache([piece]),
                torch.from_numpy(ids[start : start + BLOCK].astype(np.int64)),
                start,
                chunk_bounds(start, start + BLOCK, 512),
                need_logits=False,
            )
            taken.append(time.perf_counter() - begun)
        return taken

    def prefill(self, ids: npt.NDArray[np.int32]) -> tuple[MemoryPiece, list[float]]:
        """Prefills all of `ids`; seconds of every block."""
        piece = self._piece(len(ids))
        taken, begun = [], time.perf_counter()

        def on_block(end: int) -> None:
            nonlocal begun
            now = time.perf_counter()
            taken.append(now - begun)
            begun = now

        self._engine.prefill([piece], ids, 0, prefill_block=BLOCK, on_block=on_block)
        return piece, taken

    def decode(
        self, pieces: Sequence[KVPiece], question: Sequence[int], *, theta: float | None, steps: int
    ) -> Decoded:
        """Decodes `steps` tokens behind a prefilled prompt and a question."""
        start = pieces[-1].start + pieces[-1].capacity
        config = GenerationConfig(
            max_new_tokens=steps + 1, stop_ids=frozenset(), question_chunk_size=512, theta=theta
        )
        room = self._piece(len(question) + steps + 1, start)
        generation = self._engine.generate([*pieces, room], question, start, config)
        taken: list[float] = []
        before: float | None = None
        for _ in generation:
            now = time.perf_counter()
            if before is not None:
                taken.append(now - before)
            before = now
        lookups = max(generation.reuse.num_lookups, 1)
        return Decoded(steps_s=tuple(taken), hit_ratio=generation.reuse.num_hits / lookups)

    def _piece(self, capacity: int, start: int = 0) -> MemoryPiece:
        config = self._config
        return MemoryPiece(
            start=start,
            capacity=capacity,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            kv_dtype="bfloat16",
        )


def product_rate(config: ModelConfig, *, own: bool) -> float:
    """FLOP/s of a layer's products at 2,048 rows, weighted as they occur; medians of five.

    Args:
        config: Shape of the model.
        own: As tsdoc multiplies; otherwise as torch does, with all its threads.
    """
    shared = Products(Workers())
    seconds = flops = 0.0
    for n, k in products(config):
        x, weight = torch.randn(2048, k), torch.randn(n, k)
        taken = []
        for _ in range(6):
            begun = time.perf_counter()
            if own:
                shared.by_rows(partial(_times, weight), x)
            else:
                F.linear(x, weight)
            taken.append(time.perf_counter() - begun)
        seconds += statistics.median(taken[1:])
        flops += 2 * len(x) * n * k
    return flops / seconds


def _times(weight: torch.Tensor, linear: Linear, rows: torch.Tensor) -> torch.Tensor:
    return linear(rows, weight, None)
