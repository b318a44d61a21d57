"""Full attention beside selection: run by the same engine where that is short, else estimated."""

from __future__ import annotations

import time

import numpy as np
import torch

from tsdoc.engine.engine import Engine
from tsdoc.engine.forward import chunk_bounds
from tsdoc.errors import UsageError
from tsdoc.kernels.full_attention import full_attention
from tsdoc.profile.bench import Bench, covering
from tsdoc.profile.decode import LIMIT_S, measure_decode
from tsdoc.profile.results import DecodeRun, Full, Kernel, PrefillResult
from tsdoc.progress import Reporter
from tsdoc.terminal import format_count, format_duration

RUN_LIMIT_S = 60.0  # predicted; longer prefills are estimated
CPU_TOKENS = 65_536  # longest that is measured on a CPU
SAMPLES = (1 / 64, 1 / 16, 1 / 4, 1 / 2, 3 / 4, 1)
SAMPLE_LIMIT_S = 2.0
STEPS = 12


def compare_full(
    bench: Bench,
    prefill: PrefillResult,
    decode: DecodeRun,
    kernels: list[Kernel],
    reporter: Reporter,
) -> Full:
    """Sets full attention beside a prefill and the decode run that selects on every step.

    Says how long it is going to take where it is run.
    """
    samples = _samples(bench)
    linear_s = next(k.seconds for k in kernels if (k.phase, k.name) == ("decode", "linear layers"))
    attention_s = _sum_over_chunks(bench, samples)
    prefill_s = prefill.parts_s["linear"] + prefill.parts_s["store"] + attention_s
    one_s = _one_query(bench) * bench.prompt.config.num_layers
    decode_ms = 1e3 * (linear_s + one_s)
    measured = None
    if bench.device == "cpu" and prefill_s < RUN_LIMIT_S:
        measured = _run(bench, prefill_s, reporter)
    if measured is not None:
        prefill_s, decode_ms = measured
        method = "The same engine was run with a budget that covers the whole prompt."
    else:
        method = (
            "Estimated: torch's fastest fused attention of single chunks (K and V contiguous and "
            f"rotated already) at {len(samples)} lengths up to {samples[-1][0]:,} tokens, summed "
            "over chunks and layers, plus the linear work measured here."
        )
    return Full(
        prefill_s=prefill_s,
        decode_ms=decode_ms,
        prefill_speedup=prefill_s / prefill.seconds,
        decode_speedup=decode_ms / decode.p50_ms,
        samples=samples,
        measured=measured is not None,
        method=method,
    )


def _run(bench: Bench, predicted_s: float, reporter: Reporter) -> tuple[float, float] | None:
    """Prefill seconds and decode milliseconds of the engine; None beyond the model's window."""
    try:
        engine = bench.engine(covering(bench.selection, bench.num_tokens))
    except UsageError:
        return None
    tokens = format_count(bench.num_tokens, "token")
    reporter.note(f"full attention over {tokens}: about {format_duration(predicted_s)}")
    reporter.start("full attention", bench.num_tokens, "tokens")
    begun = time.perf_counter()
    bench.prefill(engine, bench.num_tokens, on_block=reporter.advance)
    seconds = time.perf_counter() - begun
    return seconds, _step_ms(bench, engine)


def _step_ms(bench: Bench, engine: Engine) -> float:
    run = measure_decode(bench, engine, "full", None, steps=STEPS, limit_s=LIMIT_S)
    return run.p50_ms


def _samples(bench: Bench) -> tuple[tuple[int, float], ...]:
    """(cached tokens, milliseconds) of one chunk's attention in one layer."""
    chunk = bench.selection.chunk_size
    longest = max(chunk, bench.num_tokens)
    if bench.device == "cpu":
        longest = min(longest, CPU_TOKENS)
    lengths = sorted({max(chunk, int(longest * share) // 256 * 256) for share in SAMPLES})
    return tuple((n, 1e3 * _attention_s(bench, chunk, n)) for n in lengths)


def _one_query(bench: Bench) -> float:
    """Seconds of one token's attention to the whole prompt in one layer."""
    longest = min(bench.num_tokens, CPU_TOKENS) if bench.device == "cpu" else bench.num_tokens
    return _attention_s(bench, 1, longest) * bench.num_tokens / longest


@torch.inference_mode()
def _attention_s(bench: Bench, num_queries: int, num_keys: int) -> float:
    config, device = bench.prompt.config, bench.backend.device
    dtype = torch.float32 if bench.device == "cpu" else bench.decoder.dtype

    def noise(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, config.head_dim, dtype=dtype, device=device)

    q = noise(num_queries, config.num_qo_heads)
    k, v = (noise(num_keys + num_queries, config.num_kv_heads) for _ in range(2))
    times = bench.timer.repeat(lambda: full_attention(q, k, v), limit_s=SAMPLE_LIMIT_S, most=5)
    return sorted(times)[len(times) // 2]


def _sum_over_chunks(bench: Bench, samples: tuple[tuple[int, float], ...]) -> float:
    """Seconds of all chunks and layers; between the samples, and beyond them, on straight lines."""
    chunks = chunk_bounds(0, bench.num_tokens, bench.selection.chunk_size)
    starts = np.array([start for start, _ in chunks], dtype=np.float64)
    lengths, ms = (np.array(column, dtype=np.float64) for column in zip(*samples, strict=True))
    # An unmasked chunk of its own length costs about what the causal first one does.
    at = np.interp(starts, lengths, ms)
    if len(lengths) > 1:
        slope = (ms[-1] - ms[-2]) / (lengths[-1] - lengths[-2])
        at += np.maximum(0.0, starts - lengths[-1]) * slope
    return float(at.sum()) / 1e3 * (bench.prompt.config.num_layers - 1)
