"""Scales, grids and labels of a chart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from tsdoc.terminal import visible

Show = Callable[[float], str]
WIDE, HALF = 1000, 480  # units across; a page is about 1,040 pixels wide
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 22, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A scale from `low` to `high` over [begin, end] units; logarithmic where `log`."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where `value` lies."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = (math.log10(max(x, 1e-12)) for x in (value, low, high))
        share = (value - low) / ((high - low) or 1.0)
        return self.begin + share * (self.end - self.begin)

    def ticks(self, count: int) -> list[float]:
        """Round values inside."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
            return [s for s in steps if self.low * 0.999 <= s <= self.high * 1.001]
        step = nice_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `least`."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= least * (1 - 1e-9))


def make_axes(
    xs: Sequence[float], ys: Sequence[float], width: int, height: int, *, log_y: bool = False
) -> tuple[Axis, Axis]:
    """Scales that hold all of `xs` and `ys` and, unless logarithmic, begin at 0."""
    x = Axis(low=min(0.0, *xs), high=max(xs), begin=LEFT, end=width - RIGHT)
    high = max([*ys, 1e-12])
    low = min((y for y in ys if y > 0), default=high) / 1.3 if log_y else 0.0
    top = high * (1.3 if log_y else 1.06)
    return x, Axis(low=low, high=top, begin=height - BOTTOM, end=TOP, log=log_y)


def frame(
    x: Axis,
    y: Axis,
    show_x: Show,
    show_y: Show,
    x_label: str,
    y_label: str,
    width: int,
    height: int,
) -> Markup:
    """Grid, ticks and labels."""
    parts = [grid_x(x, show_x, TOP, height - BOTTOM)]
    for tick in y.ticks(4):
        parts.append(
            Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
                LEFT, width - RIGHT, y(tick), y(tick)
            )
        )
        parts.append(text(LEFT - 8, y(tick) + 4, show_y(tick), "tick end"))
    parts.append(text((x.begin + x.end) / 2, height - 6, x_label, "axis mid"))
    parts.append(text(4, 12, y_label, "axis"))
    return Markup("").join(parts)


def grid_x(x: Axis, show: Show, top: float, base: float) -> Markup:
    """Vertical lines at round values, and the values below `base`."""
    parts: list[Markup] = []
    for tick in x.ticks(6 if x.end - x.begin > HALF else 4):
        parts.append(
            Markup('<line class="grid faint" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>').format(
                x(tick), top, base
            )
        )
        parts.append(text(x(tick), base + 16, show(tick), "tick mid"))
    return Markup("").join(parts)


def text(x: float, y: float, words: str, kind: str) -> Markup:
    """Words at a place; `kind` are the style's classes."""
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(
        kind, x, y, visible(words)
    )


def svg(parts: Sequence[Markup], width: int, height: float) -> Markup:
    """The drawing as a whole; it scales with the page."""
    kind = "wide" if width > HALF else "half"
    return Markup('<svg class="{}" viewBox="0 0 {} {:.0f}" role="img">{}</svg>').format(
        kind, width, height, Markup("").join(parts)
    )
