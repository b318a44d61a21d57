"""Charts as SVG inside a page: lines, stacked areas, bars, strips of points.

Colours are the page's `--s1` … `--s6`, so that charts follow its light and dark scheme. What the
pointer rests on shows its figures through `data-tip` (see base.js).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from tsdoc.report.axes import (
    BOTTOM,
    TOP,
    WIDE,
    Axis,
    Show,
    frame,
    grid_x,
    make_axes,
    svg,
    text,
)
from tsdoc.report.numbers import short_text
from tsdoc.terminal import visible

ROW = 30  # units per bar
MARK_ROOM = 84  # for the words beside the last mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A named line or area; `colour` is 1 to 6."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a bar."""

    name: str
    colour: int
    value: float
    tip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A row of segments behind each other; `text` stands at its end."""

    name: str
    segments: Sequence[Segment]
    text: str
    start: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Single values on a line, with marks at two of them."""

    name: str
    colour: int
    values: Sequence[float]
    marks: Sequence[tuple[str, float]]


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    show_x: Show,
    show_y: Show,
    width: int = WIDE,
    height: int = 280,
    log_y: bool = False,
    points: bool = False,
) -> Markup:
    """Lines over a common axis; `points` marks every value."""
    xs = sorted({x for line in series for x, _ in line.points})
    ys = [y for line in series for _, y in line.points]
    x, y = make_axes(xs, ys, width, height, log_y=log_y)
    parts = [frame(x, y, show_x, show_y, x_label, y_label, width, height)]
    for line in series:
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line.points)
        dash = Markup(' stroke-dasharray="6 5"') if line.dashed else ""
        parts.append(
            Markup('<polyline class="line c{}" points="{}"{}/>').format(line.colour, path, dash)
        )
        if points:
            parts += [
                Markup('<circle class="dot c{}" cx="{:.1f}" cy="{:.1f}" r="3.5"/>').format(
                    line.colour, x(a), y(b)
                )
                for a, b in line.points
            ]
    tips = [
        "\n".join(
            [show_x(value)]
            + [f"{line.name}: {show_y(b)}" for line in series for a, b in line.points if a == value]
        )
        for value in xs
    ]
    parts.append(_bands(xs, tips, x, height))
    return _with_legend(series, svg(parts, width, height))


def area_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    show_x: Show,
    show_y: Show,
    width: int = WIDE,
    height: int = 280,
) -> Markup:
    """Areas on top of each other; all series have the same x, the ends of equal steps."""
    ends = [x for x, _ in series[0].points]
    edges = [0.0, *ends]
    totals = [sum(line.points[n][1] for line in series) for n in range(len(ends))]
    x, y = make_axes(edges, totals, width, height)
    parts = [frame(x, y, show_x, show_y, x_label, y_label, width, height)]
    floor = [0.0] * len(ends)
    for line in series:
        top = [below + value for below, (_, value) in zip(floor, line.points, strict=True)]
        upper = _steps(edges, top, x, y)
        lower = _steps(edges, floor, x, y)
        path = " ".join([*upper, *reversed(lower)])
        parts.append(Markup('<polygon class="area c{}" points="{}"/>').format(line.colour, path))
        floor = top
    tips = [
        "\n".join(
            [f"up to {show_x(end)}: {show_y(totals[n])}"]
            + [f"{line.name}: {show_y(line.points[n][1])}" for line in reversed(series)]
        )
        for n, end in enumerate(ends)
    ]
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    parts.append(_bands(middles, tips, x, height))
    return _with_legend(series, svg(parts, width, height))


def bar_chart(
    bars: Sequence[Bar],
    *,
    label_width: int = 150,
    text_width: int = 110,
    width: int = WIDE,
    full: float | None = None,
    legend: bool = False,
) -> Markup:
    """Horizontal bars; `full` is the value of a bar over the whole width."""
    ends = [bar.start + sum(s.value for s in bar.segments) for bar in bars]
    most = full or max([*ends, 1e-12])
    x = Axis(low=0, high=most, begin=label_width, end=width - text_width)
    height = ROW * len(bars) + 4
    parts: list[Markup] = []
    for row, bar in enumerate(bars):
        top, middle = row * ROW + 5, row * ROW + ROW / 2 + 2
        parts.append(text(label_width - 10, middle, bar.name, "label end"))
        if full is not None:
            parts.append(
                Markup('<rect class="track" x="{:.1f}" y="{}" width="{:.1f}" height="{}" rx="2"/>')
                .format(x.begin, top, x.end - x.begin, ROW - 10)
            )  # fmt: skip
        at = bar.start
        for segment in bar.segments:
            begin, end = x(min(at, most)), x(min(at + segment.value, most))
            at += segment.value
            parts.append(
                Markup(
                    '<rect class="area c{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}" '
                    'data-tip="{}"/>'
                ).format(segment.colour, begin, top, max(end - begin, 0.75), ROW - 10,
                         visible(segment.tip))
            )  # fmt: skip
        parts.append(text(x(min(at, most)) + 8, middle, bar.text, "value"))
    drawing = svg(parts, width, height)
    return _with_legend(bars[0].segments, drawing) if legend and bars else drawing


def strip_chart(
    strips: Sequence[Strip], *, x_label: str, show: Show, label_width: int = 190, width: int = WIDE
) -> Markup:
    """Every single value as a point, one row per strip."""
    values = [v for strip in strips for v in strip.values]
    room = 46
    height = room * len(strips) + BOTTOM
    x = Axis(low=0, high=max(values, default=0.0) or 1.0, begin=label_width, end=width - MARK_ROOM)
    base = height - BOTTOM
    parts = [
        grid_x(x, short_text, 0, base),
        text((x.begin + x.end) / 2, height - 6, x_label, "axis mid"),
    ]
    for row, strip in enumerate(strips):
        middle = row * room + room / 2
        parts.append(text(label_width - 12, middle + 4, strip.name, "label end"))
        for number, value in enumerate(strip.values):
            jitter = ((number * 7919) % 13 - 6) * 1.1
            parts.append(
                Markup('<circle class="point c{}" cx="{:.1f}" cy="{:.1f}" r="3.2" data-tip="{}"/>')
                .format(
                    strip.colour, x(value), middle + jitter, f"step {number + 1}: {show(value)}"
                )
            )  # fmt: skip
        for name, value in strip.marks:
            parts.append(
                Markup('<line class="mark" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}"/>')
                .format(x(value), middle - 15, middle + 13)
            )  # fmt: skip
            left = name == strip.marks[0][0]  # names of close marks stand on either side of them
            place = x(value) - 4 if left else x(value) + 4
            parts.append(
                text(place, middle - 11, f"{name} {show(value)}", "small end" if left else "small")
            )
    return svg(parts, width, height)


def _bands(xs: Sequence[float], tips: Sequence[str], x: Axis, height: int) -> Markup:
    """Invisible columns around each x that show its figures."""
    places = [x(value) for value in xs]
    cuts = [
        places[0] - 12,
        *((a + b) / 2 for a, b in pairwise(places)),
        places[-1] + 12,
    ]
    return Markup("").join(
        Markup('<rect class="band" x="{:.1f}" y="{}" width="{:.1f}" height="{}" data-tip="{}"/>')
        .format(begin, TOP, end - begin, height - TOP - BOTTOM, visible(tip))
        for (begin, end), tip in zip(pairwise(cuts), tips, strict=True)
    )  # fmt: skip


def _steps(edges: Sequence[float], heights: Sequence[float], x: Axis, y: Axis) -> list[str]:
    """Corners of a staircase over `edges`."""
    corners = []
    for (begin, end), value in zip(pairwise(edges), heights, strict=True):
        corners += [f"{x(begin):.1f},{y(value):.1f}", f"{x(end):.1f},{y(value):.1f}"]
    return corners


def _with_legend(series: Sequence[Series] | Sequence[Segment], drawing: Markup) -> Markup:
    if len(series) < 2:
        return drawing
    items = Markup("").join(
        Markup('<li><i class="key c{}"></i>{}</li>').format(line.colour, visible(line.name))
        for line in series
    )
    return Markup('<ul class="legend">{}</ul>{}').format(items, drawing)
