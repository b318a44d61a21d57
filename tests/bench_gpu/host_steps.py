"""Decode steps that read K and V from host memory: where their time goes."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from unittest.mock import patch

import numpy as np
import torch

from tests.bench_gpu.common import DEVICE, PAPER, Row
from tests.bench_gpu.decode import timed_answer
from tsdoc.engine.engine import Engine
from tsdoc.engine.fused_decoder import FusedDecoder
from tsdoc.engine.generate import GenerationConfig
from tsdoc.kernels.hot_rows import HotRows
from tsdoc.kernels.index_use import IndexConfig
from tsdoc.kernels.kv import DevicePiece
from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.triton_backend import TritonBackend

PROFILED = 8
LEAST_MS = 0.02  # of a step: kernels that take less are left out
# What keeps rows on the device, by name.
KEEPERS: dict[str, Callable[..., HotRows | None]] = {
    "as built": HotRows,
    "no rows kept": lambda *what: None,
}


def options(count: int, theta: float | None = None) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=count, stop_ids=frozenset(), question_chunk_size=512, theta=theta
    )


def profile_steps(engine: Engine, pieces: Sequence[DevicePiece], start: int) -> list[Row]:
    """Milliseconds of a step that each kernel takes, and its launches, selecting in every layer."""
    generation = iter(engine.generate(pieces, list(range(20)), start, options(PROFILED + 8)))
    for _ in itertools.islice(generation, 6):  # the question, compilation, capture
        pass
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        begun = time.perf_counter()
        for _ in itertools.islice(generation, PROFILED):
            pass
        torch.cuda.synchronize()
        passed = time.perf_counter() - begun
    rows: list[Row] = []
    total = 0.0
    for event in trace.key_averages():
        step_ms = event.device_time_total / 1e3 / PROFILED
        total += step_ms
        if step_ms >= LEAST_MS:
            rows.append(
                {
                    "what": f"  {event.key[:60]}", "step_ms": step_ms,
                    "us": event.device_time_total / event.count, "launches": event.count / PROFILED,
                }
            )  # fmt: skip
    rows.sort(key=lambda row: -float(str(row["step_ms"])))
    whole: Row = {
        "what": "kernels of a step", "step_ms": total, "profiled_step_ms": passed * 1e3 / PROFILED
    }  # fmt: skip
    return [whole, *rows]


def bus_use(backend: TritonBackend) -> Row:
    """Rows of the last answer's steps: wanted, found on the device, and bytes over the bus."""
    last = backend._parts.decodes._last
    if last is None or last[0].hot is None:
        return {}
    counts, row = last[0].hot.counts(), backend.pool.keys[0][0].nbytes
    lookups, hits = last[0].counts()
    keys, values = (
        counts[f"{name}_wanted"] - counts[f"{name}_found"] for name in ("keys", "values")
    )
    return {
        "keys_per_layer": counts["keys_wanted"] / (lookups - hits),
        "keys_found": counts["keys_found"] / counts["keys_wanted"],
        "values_found": counts["values_found"] / counts["values_wanted"],
        "bus_MB_per_step": (keys + values) * row * len(backend.pool.keys) / lookups / 1e6,
    }


def fill_from_device(pool: PagePool) -> None:
    """Random K and V, made on the device."""
    for tensor in (*pool.keys, *pool.values):
        for part in tensor.split(1 << 18):
            part.copy_(torch.randn(part.shape, dtype=part.dtype, device=DEVICE))


def host_steps(decoder: FusedDecoder, num_tokens: int, cap: int) -> list[Row]:
    """Milliseconds per token, resident and from host memory, without a prefill."""
    rows = _variants(decoder, num_tokens, None, "resident", ["as built"])
    rows += _variants(decoder, num_tokens, cap, "from the host", list(KEEPERS))
    torch.cuda.set_per_process_memory_fraction(1.0)
    return rows


def _variants(
    decoder: FusedDecoder, num_tokens: int, cap: int | None, where: str, names: Sequence[str]
) -> list[Row]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    backend = TritonBackend(
        decoder.config, kv_dtype="bfloat16", compute_dtype=torch.bfloat16, device=DEVICE,
        memory_bytes=cap,
    )  # fmt: skip
    engine = Engine(
        decoder, PAPER, max_tokens=num_tokens + 4096, question_chunk_size=512, backend=backend,
        index=IndexConfig(floor=0.0),
    )  # fmt: skip
    piece = DevicePiece(start=0, capacity=num_tokens + 512)
    begun = time.perf_counter()
    engine.cache([piece])
    torch.cuda.synchronize()
    room_s = time.perf_counter() - begun
    fill_from_device(backend.pool)
    torch.cuda.synchronize()
    backend.pool.resident = num_tokens
    rows: list[Row] = [{"what": f"room, {where}", "s": room_s, "on_host": backend.pool.on_host}]
    for name in names:
        backend._parts.decodes._last = None
        with patch("tsdoc.kernels.triton_decode.HotRows", KEEPERS[name]):
            timed_answer(engine, piece, num_tokens, options(6))  # compiles and makes the index
            times, _ = timed_answer(engine, piece, num_tokens, options(32))
            row: Row = {
                "what": f"steps, {where}, {name}", "tokens": num_tokens,
                "p50_ms": float(np.median(times[4:])),
                "p95_ms": float(np.quantile(times[4:], 0.95)), "first_ms": times[0],
                **bus_use(backend), "peak_reserved_GB": torch.cuda.max_memory_reserved() / 1e9,
            }  # fmt: skip
            rows += [row, *profile_steps(engine, [piece], num_tokens)]
    return rows
