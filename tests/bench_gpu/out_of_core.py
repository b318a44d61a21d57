"""A prompt whose K and V lie in host memory, beside the same one on the device."""

from __future__ import annotations

import gc
import time

import numpy as np
import torch

from tests.bench_gpu.common import DEVICE, PAPER, Row, random_ids
from tests.bench_gpu.host_steps import bus_use, options, profile_steps
from tsdoc.engine.engine import Engine
from tsdoc.engine.fused_decoder import FusedDecoder
from tsdoc.kernels.index_use import IndexConfig
from tsdoc.kernels.kv import DevicePiece
from tsdoc.kernels.triton_backend import TritonBackend

ROOM = 512


def out_of_core(
    decoder: FusedDecoder, num_tokens: int, block: int, cap: int, count: int = 40
) -> list[Row]:
    """Prefill, and an answer with and without the Selection Cache, resident and with a cap."""
    rows: list[Row] = []
    answers: dict[str, list[list[int]]] = {}
    for name, limit in (("resident", None), (f"capped at {cap / 1e9:g} GB", cap)):
        torch.cuda.reset_peak_memory_stats()
        backend = TritonBackend(
            decoder.config, kv_dtype="bfloat16", compute_dtype=torch.bfloat16, device=DEVICE,
            memory_bytes=limit,
        )  # fmt: skip
        row, profiled, answers[name] = _run(decoder, backend, num_tokens, block, count)
        row = {"what": name, "tokens": num_tokens, **row, "on_host": backend.pool.on_host}
        row["peak_allocated_GB"] = torch.cuda.max_memory_allocated() / 1e9
        row["peak_reserved_GB"] = torch.cuda.max_memory_reserved() / 1e9
        rows += [row, *profiled]
        del backend
        gc.collect()
        torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    first, second = answers.values()
    same = [
        sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(first, second, strict=True)
    ]
    return [*rows, {"what": "equal tokens of the answers", "same": same, "of": count}]


def _run(
    decoder: FusedDecoder, backend: TritonBackend, num_tokens: int, block: int, count: int
) -> tuple[Row, list[Row], list[list[int]]]:
    engine = Engine(
        decoder, PAPER, max_tokens=num_tokens + ROOM, question_chunk_size=512, backend=backend,
        index=IndexConfig(floor=0.0),
    )  # fmt: skip
    ids = random_ids(num_tokens)
    pieces = [DevicePiece(start=0, capacity=num_tokens + ROOM)]
    begun = time.perf_counter()
    engine.cache(pieces)
    torch.cuda.synchronize()
    room_s = time.perf_counter() - begun
    engine.prefill(pieces, ids[: 3 * block], 0, prefill_block=block, on_block=lambda end: None)
    torch.cuda.synchronize()
    begun, marks = time.perf_counter(), []
    engine.prefill(
        pieces, ids, 0, prefill_block=block,
        on_block=lambda end: marks.append((end, time.perf_counter() - begun)),
    )  # fmt: skip
    torch.cuda.synchronize()
    row: Row = {"room_s": room_s, "prefill_s": time.perf_counter() - begun}
    row |= {f"at_{end // 1024}k_s": t for end, t in marks if end in (131_072, 524_288)}
    answers = []
    for name, theta in (("selects", None), ("theta_0.9", 0.9)):
        for _ in range(2):  # the first compiles and makes the index
            times, last, tokens = [], time.perf_counter(), []
            generation = engine.generate(pieces, list(range(20)), num_tokens, options(count, theta))
            for token in generation:
                now = time.perf_counter()
                times.append((now - last) * 1e3)
                last = now
                tokens.append(token)
        answers.append(tokens)
        row |= {
            f"{name}_p50_ms": float(np.median(times[4:])), f"{name}_first_ms": times[0],
            f"{name}_hits": generation.reuse.num_hits,
            f"{name}_lookups": generation.reuse.num_lookups,
        }  # fmt: skip
        row |= {f"{name}_{key}": value for key, value in bus_use(backend).items()}
    return row, profile_steps(engine, pieces, num_tokens), answers
