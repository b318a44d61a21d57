"""The charts of a profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from tsdoc.profile.results import Report, SweepRow
from tsdoc.report.axes import HALF
from tsdoc.report.charts import (
    Bar,
    Segment,
    Series,
    Strip,
    area_chart,
    bar_chart,
    line_chart,
    strip_chart,
)
from tsdoc.report.numbers import percent_text, scaled_text, seconds_text, short_text, three

COLOURS = {"linear": 1, "selection": 2, "attention": 3, "store": 4, "other": 5}
FULL, OURS = 6, 1


def cold_figure(report: Report) -> Markup:
    """Stages from nothing to the first token, one after the other."""
    return _waterfall(report.cold_s)


def warm_figure(report: Report) -> Markup | None:
    """The same of a new process that finds K and V."""
    return None if report.warm is None else _waterfall(report.warm.stages_s)


def parts_figure(report: Report) -> Markup:
    """The prefill by kind of work."""
    parts = report.prefill.parts_s
    total = sum(parts.values())
    segments = [
        Segment(
            name=f"{name} {percent_text(seconds / total)}",
            colour=COLOURS[name],
            value=seconds,
            tip=f"{name}: {seconds_text(seconds)}, {percent_text(seconds / total)}",
        )
        for name, seconds in parts.items()
    ]
    bar = Bar(name="", segments=segments, text=seconds_text(total))
    return bar_chart([bar], label_width=0, text_width=90, legend=True)


def time_figure(report: Report) -> Markup | None:
    """What a token costs as the prompt grows, by kind of work; None for a single block."""
    blocks = report.prefill.blocks
    if len(blocks) < 2:
        return None
    series = [
        Series(
            name=name,
            colour=colour,
            points=[(block.end, block.parts_s[name] / block.num_tokens) for block in blocks],
        )
        for name, colour in COLOURS.items()
    ]
    return area_chart(
        series, x_label="tokens", y_label="time per token", show_x=short_text, show_y=seconds_text
    )


def speed_figure(report: Report) -> Markup | None:
    """Tokens per second of each block, and what full attention would do."""
    blocks = report.prefill.blocks
    if len(blocks) < 2:
        return None
    ours = Series(
        name="selection",
        colour=OURS,
        points=[(block.end, block.num_tokens / block.seconds) for block in blocks],
    )
    series = [ours]
    if report.full is not None:
        series.append(
            Series(
                name="full attention, from single chunks",
                colour=FULL,
                points=_full_rates(report),
                dashed=True,
            )
        )
    return line_chart(
        series,
        x_label="tokens",
        y_label="tokens/s",
        show_x=short_text,
        show_y=short_text,
        log_y=len(series) > 1,
        points=len(blocks) <= 16,
    )


def decode_figure(report: Report) -> Markup:
    """Every decode step as a point."""
    strips = [
        Strip(
            name=run.name,
            colour=colour,
            values=run.steps_ms,
            marks=(("p50", run.p50_ms), ("p95", run.p95_ms)),
        )
        for run, colour in zip(report.decode, (2, 1, 3), strict=False)
    ]
    return strip_chart(strips, x_label="milliseconds per token", show=three)


def theta_figures(report: Report) -> tuple[Markup, Markup] | None:
    """Hits and speed over theta; None where nothing is selected."""
    runs = [run for run in report.theta_curve if run.theta is not None]
    if len(runs) < 2:
        return None
    hits = Series(
        name="hits", colour=3, points=[(run.theta or 0.0, run.hit_ratio or 0.0) for run in runs]
    )
    speed = Series(name="p50", colour=1, points=[(run.theta or 0.0, run.p50_ms) for run in runs])
    return (
        line_chart(
            [hits], x_label="theta", y_label="hits", show_x=_plain, show_y=percent_text,
            width=HALF, height=230, points=True,
        ),
        line_chart(
            [speed], x_label="theta", y_label="ms per token, p50", show_x=_plain, show_y=short_text,
            width=HALF, height=230, points=True,
        ),
    )  # fmt: skip


def roofline_figure(report: Report) -> Markup:
    """Each kind of work's share of the roofline."""
    bars = [
        Bar(
            name=f"{kernel.phase}: {kernel.name}",
            segments=[
                Segment(
                    name=kernel.bound,
                    colour=1 if kernel.bound == "compute" else 3,
                    value=min(kernel.share, 1.0),
                    tip=(
                        f"{kernel.name}: {seconds_text(kernel.seconds)}\n"
                        f"least possible {seconds_text(kernel.floor_s)}, bound by {kernel.bound}\n"
                        f"{scaled_text(kernel.num_bytes, 'B')}, "
                        f"{scaled_text(kernel.num_flops, 'FLOP')}"
                    ),
                )
            ],
            text=f"{percent_text(kernel.share)} · {kernel.bound}",
        )
        for kernel in report.kernels
    ]
    return bar_chart(bars, label_width=270, text_width=130, full=1.0)


def full_figure(report: Report) -> tuple[Markup, Markup] | None:
    """Prefill and decode beside full attention."""
    if report.full is None:
        return None
    step = report.decode[0].p50_ms / 1e3
    return (
        _beside(report.prefill.seconds, report.full.prefill_s),
        _beside(step, report.full.decode_ms / 1e3),
    )


def chunk_figure(report: Report) -> Markup | None:
    """Full attention of one chunk in one layer, over the cached tokens."""
    if report.full is None or len(report.full.samples) < 2:
        return None
    points = [(tokens, ms / 1e3) for tokens, ms in report.full.samples]
    return line_chart(
        [Series(name="full attention", colour=FULL, points=points)],
        x_label="cached tokens", y_label="one chunk, one layer",
        show_x=short_text, show_y=seconds_text, height=220, points=True,
    )  # fmt: skip


def sweep_figures(report: Report) -> list[tuple[str, list[Markup], Sequence[tuple[str, ...]]]]:
    """Per option: its name, its charts, its rows."""
    options = dict.fromkeys(row.option for row in report.sweeps)
    return [
        (option, _sweep_charts(rows), [sweep_cells(row, missing="–") for row in rows])
        for option in options
        if (rows := [row for row in report.sweeps if row.option == option])
    ]


def _waterfall(stages_s: Mapping[str, float]) -> Markup:
    bars, start = [], 0.0
    total = sum(stages_s.values()) or 1.0
    for name, seconds in stages_s.items():
        tip = f"{seconds_text(seconds)}, {percent_text(seconds / total)}"
        segment = Segment(name=name, colour=OURS, value=seconds, tip=tip)
        shown = name.replace("_", " ")
        bars.append(Bar(name=shown, segments=[segment], text=seconds_text(seconds), start=start))
        start += seconds
    return bar_chart(bars, label_width=110, text_width=92, width=HALF)


def _beside(ours_s: float, full_s: float) -> Markup:
    bars = [
        Bar(
            name=name,
            segments=[Segment(name=name, colour=colour, value=value, tip=seconds_text(value))],
            text=seconds_text(value),
        )
        for name, colour, value in (("selection", OURS, ours_s), ("full", FULL, full_s))
    ]
    return bar_chart(bars, label_width=80, text_width=100, width=HALF)


def _full_rates(report: Report) -> list[tuple[float, float]]:
    """Tokens per second of each block with full attention: measured linear work plus chunks."""
    assert report.full is not None  # noqa: S101 - asked before
    lengths, ms = (np.array(c, dtype=np.float64) for c in zip(*report.full.samples, strict=True))
    chunk, layers = int(str(report.selection["chunk_size"])), report.num_layers
    rates = []
    for block in report.prefill.blocks:
        one_ms = float(np.interp(block.end - block.num_tokens / 2, lengths, ms))
        attention_s = one_ms / 1e3 * (layers - 1) * block.num_tokens / chunk
        seconds = block.parts_s["linear"] + block.parts_s["store"] + attention_s
        rates.append((float(block.end), block.num_tokens / seconds))
    return rates


def _sweep_charts(rows: Sequence[SweepRow]) -> list[Markup]:
    known = [row for row in rows if row.value is not None]
    charts = []
    for label, colour, values in (
        ("prefill tokens/s", 1, [(row.value, row.prefill_tokens_per_s) for row in known]),
        ("decode ms", 2, [(row.value, row.decode_ms) for row in known]),
        ("hits", 3, [(row.value, row.hit_ratio) for row in known]),
    ):
        points = sorted((x, y) for x, y in values if x is not None and y is not None)
        if len(points) < 2 or (label == "hits" and not any(y for _, y in points)):
            continue
        charts.append(
            line_chart(
                [Series(name=label, colour=colour, points=points)],
                x_label=rows[0].option, y_label=label, show_x=_plain,
                show_y=percent_text if label == "hits" else short_text,
                width=HALF, height=210, points=True,
            )
        )  # fmt: skip
    return charts


def sweep_cells(row: SweepRow, *, missing: str) -> tuple[str, ...]:
    """One value of an option as a table shows it; `missing` is for what was not measured."""
    return (
        "off" if row.value is None else f"{row.value:g}",
        missing if row.prefill_tokens_per_s is None else f"{row.prefill_tokens_per_s:,.0f}",
        missing if row.decode_ms is None else three(row.decode_ms),
        missing if row.hit_ratio is None else percent_text(row.hit_ratio),
        row.note or "",
    )


def _plain(value: float) -> str:
    return f"{value:g}"
