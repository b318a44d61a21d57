"""Decode steps under several thresholds, and the kinds of work in one step."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from tsdoc.engine.engine import Engine
from tsdoc.engine.selection_cache import MAX_HITS
from tsdoc.kernels.interface import DeviceCache, DeviceDecode
from tsdoc.kernels.selection import chunk_range
from tsdoc.profile.bench import Bench
from tsdoc.profile.counts import Traffic, decode_attention, decode_linear, decode_selection
from tsdoc.profile.results import Ceilings, DecodeRun, Kernel
from tsdoc.profile.roofline import make_kernel

SKIPPED = 3  # steps that compile, that are captured, or that find an empty Selection Cache
LEAST_STEPS = 4
STEPS = 48  # fewer than MAX_HITS, so that no refresh is forced
LIMIT_S = 12.0
CURVE = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
CURVE_STEPS = 24
CURVE_LIMIT_S = 3.0
PART_LIMIT_S = 1.0


def measure_decode(
    bench: Bench,
    engine: Engine,
    name: str,
    theta: float | None,
    *,
    start: int | None = None,
    steps: int,
    limit_s: float,
) -> DecodeRun:
    """Answers once and takes the time of each step; stops after about `limit_s`."""
    at = bench.num_tokens if start is None else start
    begun = last = time.perf_counter()
    generation = bench.generate(engine, at, theta, steps + SKIPPED + 1)
    selects = is_selective(bench, engine, at)
    times: list[float] = []
    for _ in generation:
        now = time.perf_counter()
        times.append(now - last)
        last = now
        if len(times) > SKIPPED + LEAST_STEPS and now - begun > limit_s:
            break
    return DecodeRun(
        name=name,
        theta=theta,
        first_token_s=times[0],
        steps_ms=tuple(1e3 * t for t in times[1 + SKIPPED :]),
        lookups=generation.reuse.num_lookups if selects else 0,
        hits=generation.reuse.num_hits if selects else 0,
    )


def decode_runs(bench: Bench, on_run: Callable[[str], None]) -> tuple[DecodeRun, ...]:
    """A selection on every step, the settings' threshold, hits in all layers, and the key index.

    The first and the third read all keys; the second is what answers do.
    """
    exact, shipped = bench.engine(), bench.engine(index=bench.index)
    theta = bench.settings.engine.theta
    wanted: list[tuple[Engine, str, float | None]] = [(exact, "selection on every step", None)]
    if theta is not None:
        wanted.append((shipped, f"default (theta {theta:g})", theta))
    wanted.append((exact, "hits in all layers", -1.0))
    if bench.index is not None:
        wanted.append((shipped, "selection by the key index", None))
    runs = []
    for engine, name, value in wanted:
        on_run(name)
        runs.append(measure_decode(bench, engine, name, value, steps=STEPS, limit_s=LIMIT_S))
    return tuple(runs)


def theta_curve(bench: Bench, on_run: Callable[[str], None]) -> tuple[DecodeRun, ...]:
    """Hits and speed for several thresholds; nothing where nothing is selected."""
    engine = bench.engine()
    if not is_selective(bench, engine, bench.num_tokens):
        return ()
    runs = []
    for theta in CURVE:
        name = f"theta {theta:g}"
        on_run(name)
        runs.append(
            measure_decode(bench, engine, name, theta, steps=CURVE_STEPS, limit_s=CURVE_LIMIT_S)
        )
    return tuple(runs)


def is_selective(bench: Bench, engine: Engine, start: int) -> bool:
    """Whether an answer behind `start` has more candidates than it may attend to."""
    position = start + len(bench.prompt.question)
    selection = engine.runner.selection
    return chunk_range(position, position + 1, selection).num_candidates > selection.top_k


def decode_kernels(bench: Bench, traffic: Traffic, ceilings: Ceilings) -> list[Kernel]:
    """The kinds of work of one decode step beside their floors, each measured by itself."""
    config, selection = bench.prompt.config, bench.selection
    around = chunk_range(bench.num_tokens, bench.num_tokens + 1, selection)
    linear_s, parts = decode_parts(bench)
    layers = config.num_layers
    linear = decode_linear(config, traffic)
    kernels = [make_kernel("linear layers", "decode", linear_s, linear, ceilings)]
    if parts is None:
        return kernels
    attend_s, select_s = parts
    return [
        *kernels,
        make_kernel(
            "selection and gathering",
            "decode",
            select_s,
            decode_selection(config, selection, around, traffic) * layers,
            ceilings,
        ),
        make_kernel(
            "attention to the window",
            "decode",
            attend_s,
            decode_attention(config, selection, around, traffic) * layers,
            ceilings,
        ),
    ]


@torch.inference_mode()
def decode_parts(bench: Bench) -> tuple[float, tuple[float, float] | None]:
    """Seconds of one step's linear work, and (attention to a window, selection and gathering).

    The latter are None with `head_vote` on CUDA, whose steps wait for the host.
    """
    config = bench.prompt.config
    layers = range(config.num_layers)
    inner = bench.loaded.steps or bench.loaded.decoder
    device = bench.backend.device
    hidden = inner.embed(torch.zeros(1, dtype=torch.int64))
    attention = torch.zeros(1, config.num_qo_heads, config.head_dim, device=device)
    attention = attention.to(inner.dtype)

    def linear() -> None:
        for layer in layers:
            inner.project(layer, hidden)
            inner.finish_layer(layer, hidden, attention)
        inner.logits(hidden)

    linear_s = _median(bench, linear)
    q, k, v = inner.project(0, inner.embed(torch.zeros(1, dtype=torch.int64)))
    cache = bench.engine().cache([bench.piece])
    if bench.device == "cuda":
        return linear_s, _on_device(bench, cache, q, k, v)
    return linear_s, _on_host(bench, cache, q)


def _on_device(
    bench: Bench, cache: DeviceCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[float, float] | None:
    """Attention where every layer hits; what is added where every layer selects."""
    seconds = []
    for theta in (-1.0, None):
        decode = cache.start_decode(bench.num_tokens, theta=theta, max_hits=MAX_HITS, allowed=None)
        if decode is None:
            return None
        seconds.append(_median(bench, partial(_attend_all, bench, decode, q, k, v)))
    return seconds[0], max(0.0, seconds[1] - seconds[0])


def _attend_all(
    bench: Bench, decode: DeviceDecode, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    for layer in range(bench.prompt.config.num_layers):
        decode.attend(layer, q, k, v)


def _on_host(bench: Bench, cache: DeviceCache, q: torch.Tensor) -> tuple[float, float]:
    """Attention to a window in all layers, and selection and gathering in all layers."""
    start, layers = bench.num_tokens, range(bench.prompt.config.num_layers)
    around = chunk_range(start, start + 1, bench.selection)
    query = cache.selection_queries(q, [around])
    (selected,) = cache.select(0, query, [around])

    def select() -> None:
        for layer in layers:
            (chosen,) = cache.select(layer, query, [around])
            cache.open_window(layer, chosen, around)

    select_s = _median(bench, select)
    # A window per layer, as in a real step: a single one would stay in the CPU's own caches.
    windows = [cache.open_window(layer, selected, around) for layer in layers]

    def attend() -> None:
        for window in windows:
            window.attend(q, start)

    return _median(bench, attend), select_s


def _median(bench: Bench, call: Callable[[], object]) -> float:
    times = sorted(bench.timer.repeat(call, limit_s=PART_LIMIT_S))
    return times[len(times) // 2]
