"""Several values of one option, each on the last whole block of the prompt and a few steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from tsdoc.errors import UsageError
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.profile.bench import Bench
from tsdoc.profile.decode import CURVE_LIMIT_S, measure_decode
from tsdoc.profile.results import SweepOption, SweepRow

VALUES: dict[SweepOption, tuple[float | None, ...]] = {
    "top_k": (512, 1024, 2048, 4096, 8192),
    "theta": (None, 0.99, 0.95, 0.9, 0.8, 0.5),
    "chunk": (128, 256, 512, 1024),
}
STEPS = 12


def run_sweep(bench: Bench, option: SweepOption, on_value: Callable[[str], None]) -> list[SweepRow]:
    """Tries every value of `option`; a prefill rate is that of the last whole block."""
    rows = []
    for value in VALUES[option]:
        shown = "off" if value is None else f"{value:g}"
        on_value(f"{option} {shown}")
        try:
            rows.append(_try(bench, option, value))
        except UsageError as error:
            rows.append(SweepRow(option=option, value=value, note=error.message))
    return rows


def _try(bench: Bench, option: SweepOption, value: float | None) -> SweepRow:
    theta, selection = bench.settings.engine.theta, bench.selection
    if option == "theta":
        theta = value
    elif value is not None:
        selection = _changed(selection, option, int(value))
    if bench.block % selection.chunk_size:
        raise UsageError(f"prefill_block {bench.block} is no multiple of it")
    engine = bench.engine(selection)
    end = bench.num_tokens // bench.block * bench.block or bench.num_tokens
    start = max(0, (end - 1) // bench.block * bench.block)
    rate = None
    if option != "theta":
        if bench.device == "cuda":  # the first call compiles
            bench.prefill(engine, end, start)
        begun = time.perf_counter()
        bench.prefill(engine, end, start)
        rate = (end - start) / (time.perf_counter() - begun)
    run = measure_decode(
        bench, engine, option, theta, start=end, steps=STEPS, limit_s=CURVE_LIMIT_S
    )
    return SweepRow(
        option=option,
        value=value,
        prefill_tokens_per_s=rate,
        decode_ms=run.p50_ms,
        hit_ratio=run.hit_ratio,
    )


def _changed(selection: SelectionConfig, option: SweepOption, value: int) -> SelectionConfig:
    if option == "top_k":
        return replace(selection, top_k=value)
    return replace(selection, chunk_size=value)
