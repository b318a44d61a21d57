"""Measured numbers as people read them: three digits and a unit of the right size."""

from __future__ import annotations

_SMALL = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def seconds_text(seconds: float) -> str:
    """Returns "25.2 s", "340 ms", "12.5 µs", "4 min 10 s"."""
    if seconds >= 120:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    for scale, unit in _SMALL:
        if seconds >= scale * 0.9995:
            return f"{three(seconds / scale)} {unit}"
    return "0 s" if seconds == 0 else f"{three(seconds * 1e6)} µs"


def scaled_text(value: float, unit: str) -> str:
    """Returns "4.23 TB/s" for 4.23e12 and "B/s": decimal prefixes."""
    if value == 0:
        return f"0 {unit}"
    for scale, prefix in _LARGE:
        if abs(value) >= scale * 0.9995:
            return f"{three(value / scale)} {prefix}{unit}"
    return f"{three(value)} {unit}"


def short_text(value: float) -> str:
    """Returns "250k", "1.5M": for axes."""
    for scale, prefix in _LARGE:
        if abs(value) >= scale:
            return f"{value / scale:.3g}{prefix}"
    return f"{value:.3g}"


def percent_text(ratio: float) -> str:
    """Returns "42 %", and one decimal below 10."""
    value = 100 * ratio
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %"


def times_text(factor: float) -> str:
    """Returns "24.8×"."""
    return f"{three(factor)}×"


def three(value: float) -> str:
    """Returns three significant digits, or all of those before the point."""
    size = abs(value)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{value:,.{digits}f}"
