"""The whole prefill, split by kind of work and by block."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from tsdoc.engine.forward import chunk_bounds
from tsdoc.kernels.selection import ChunkRange, SelectionConfig, chunk_range
from tsdoc.profile.bench import Bench
from tsdoc.profile.counts import (
    Traffic,
    Work,
    block_attention,
    block_selection,
    prefill_linear,
    store_kv,
)
from tsdoc.profile.results import PARTS, Block, Ceilings, Kernel, PrefillResult
from tsdoc.profile.roofline import make_kernel

NAMES = {
    "linear": "linear layers",
    "selection": "selection: scores, votes, top-k",
    "attention": "gathering and attention",
    "store": "K and V into the cache",
}


def measure_prefill(
    bench: Bench, warm_up_s: float, on_block: Callable[[int], None]
) -> PrefillResult:
    """Prefills the whole prompt once."""
    engine, recorder = bench.engine(), bench.recorder
    begun = time.perf_counter()
    with recorder.recording():
        bench.prefill(engine, bench.num_tokens, on_block=on_block)
    seconds = time.perf_counter() - begun
    timed = recorder.timer.seconds([(begin, end) for _, _, begin, end in recorder.spans])
    by_block: list[dict[str, float]] = [dict.fromkeys(NAMES, 0.0) for _ in recorder.borders]
    for (part, block, _, _), spent in zip(recorder.spans, timed, strict=True):
        by_block[block][part] += spent
    borders = list(itertools.pairwise(recorder.borders))
    walls = recorder.timer.seconds([(begin[1], end[1]) for begin, end in borders])
    blocks = tuple(
        Block(
            end=last[0],
            num_tokens=last[0] - first[0],
            seconds=wall,
            parts_s=_with_other(by_block[number], wall),
        )
        for number, ((first, last), wall) in enumerate(zip(borders, walls, strict=True))
    )
    recorder.spans.clear()
    total = {part: sum(block[part] for block in by_block) for part in NAMES}
    return PrefillResult(
        num_tokens=bench.num_tokens,
        block_tokens=bench.block,
        seconds=seconds,
        warm_up_s=warm_up_s,
        parts_s=_with_other(total, seconds),
        blocks=blocks,
    )


def prefill_kernels(
    bench: Bench, result: PrefillResult, traffic: Traffic, ceilings: Ceilings
) -> list[Kernel]:
    """The kinds of work of a prefill beside their floors."""
    config, selection = bench.prompt.config, bench.selection
    work = dict.fromkeys(NAMES, Work())
    attending = config.num_layers - 1  # the last layer stops after K and V
    for first, last in chunk_bounds(0, bench.num_tokens, bench.block):
        ranges = block_ranges(first, last, selection)
        work["linear"] += prefill_linear(config, last - first, traffic)
        work["store"] += store_kv(config, last - first, traffic)
        work["selection"] += block_selection(config, selection, ranges, traffic) * attending
        work["attention"] += block_attention(config, selection, ranges, traffic) * attending
    return [
        make_kernel(NAMES[part], "prefill", result.parts_s[part], work[part], ceilings)
        for part in NAMES
    ]


def block_ranges(first: int, last: int, selection: SelectionConfig) -> list[ChunkRange]:
    """The chunks of a block and what they attend to."""
    bounds = chunk_bounds(first, last, selection.chunk_size)
    return [chunk_range(start, end, selection) for start, end in bounds]


def _with_other(parts: dict[str, float], total: float) -> dict[str, float]:
    known = {part: parts[part] for part in PARTS if part != "other"}
    return {**known, "other": max(0.0, total - sum(known.values()))}
