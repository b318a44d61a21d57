"""Charts keep their proportions, show every figure, and escape what they are given."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from markupsafe import Markup

from tsdoc.report.axes import Axis, nice_step
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
from tsdoc.report.numbers import (
    percent_text,
    scaled_text,
    seconds_text,
    short_text,
    three,
    times_text,
)

HOSTILE = '<script>alert(1)</script>\u2028"'


def parse(chart: Markup) -> ElementTree.Element:
    # XML, unlike HTML, turns line breaks inside attributes into spaces.
    return ElementTree.fromstring(f"<div>{chart}</div>".replace("\n", "&#10;"))


def show(value: float) -> str:
    return f"{value:g}"


def line(*points: tuple[float, float], name: str = "a") -> Series:
    return Series(name=name, colour=1, points=points)


def test_a_line_goes_through_its_points() -> None:
    chart = line_chart(
        [line((0, 0), (10, 5), (20, 10))], x_label="x", y_label="y", show_x=show, show_y=show
    )
    (path,) = parse(chart).iter("polyline")
    points = [tuple(map(float, point.split(","))) for point in path.attrib["points"].split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y2 < y1 < y0


def test_the_pointer_finds_every_series_at_a_place() -> None:
    chart = line_chart(
        [line((1, 2), (2, 3)), line((1, 5), name="b")],
        x_label="x", y_label="y", show_x=show, show_y=show,
    )  # fmt: skip
    tips = [rect.attrib["data-tip"] for rect in parse(chart).iter("rect")]
    assert tips == ["1\na: 2\nb: 5", "2\na: 3"]


def test_areas_lie_on_top_of_each_other() -> None:
    series = [line((10, 1), (20, 2)), line((10, 3), (20, 1), name="b")]
    chart = area_chart(series, x_label="x", y_label="y", show_x=show, show_y=show)
    lower, upper = (
        [point.split(",") for point in polygon.attrib["points"].split()]
        for polygon in parse(chart).iter("polygon")
    )
    assert upper[4:] == lower[:4][::-1]  # the upper one's floor is the lower one's top
    tips = [rect.attrib["data-tip"] for rect in parse(chart).iter("rect")]
    assert tips[0] == "up to 10: 4\nb: 3\na: 1"


def test_bars_are_as_long_as_their_values() -> None:
    bars = [
        Bar(name=name, segments=[Segment(name=name, colour=1, value=value, tip="")], text="")
        for name, value in (("one", 1.0), ("two", 2.0))
    ]
    one, two = (float(rect.attrib["width"]) for rect in parse(bar_chart(bars)).iter("rect"))
    assert two == pytest.approx(2 * one, abs=0.2)


def test_a_bar_beyond_the_whole_is_cut() -> None:
    bar = Bar(name="x", segments=[Segment(name="x", colour=1, value=3.0, tip="")], text="300 %")
    track, filled = parse(bar_chart([bar], full=1.0)).iter("rect")
    assert filled.attrib["width"] == track.attrib["width"]


def test_every_value_of_a_strip_is_a_point() -> None:
    strip = Strip(name="s", colour=2, values=(1.0, 2.0, 4.0), marks=(("p50", 2.0), ("p95", 4.0)))
    chart = parse(strip_chart([strip], x_label="ms", show=show))
    assert len(list(chart.iter("circle"))) == 3
    words = [element.text for element in chart.iter("text")]
    assert {"p50 2", "p95 4", "s", "ms"} <= set(words)


def test_names_and_tips_are_escaped() -> None:
    segment = Segment(name=HOSTILE, colour=1, value=1.0, tip=HOSTILE)
    chart = bar_chart([Bar(name=HOSTILE, segments=[segment, segment], text=HOSTILE)], legend=True)
    assert "<script" not in chart
    assert "\u2028" not in chart
    assert r"\u2028" in chart
    parse(chart)


@pytest.mark.parametrize("points", [[(1.0, 0.0)], [(5.0, 3.0)], [(0.0, 0.0), (1.0, 0.0)]])
@pytest.mark.parametrize("log_y", [False, True])
def test_charts_without_extent_are_drawn(points: list[tuple[float, float]], log_y: bool) -> None:
    chart = line_chart(
        [line(*points)], x_label="x", y_label="y", show_x=show, show_y=show, log_y=log_y
    )
    assert "nan" not in chart
    parse(chart)


@pytest.mark.parametrize(
    ("least", "step"), [(0.9, 1), (1.1, 2), (2.2, 2.5), (3, 5), (7, 10), (130, 200), (0, 1)]
)
def test_steps_are_round(least: float, step: float) -> None:
    assert nice_step(least) == pytest.approx(step)


def test_ticks_lie_inside_their_axis() -> None:
    assert Axis(low=0, high=10, begin=0, end=100).ticks(4) == [0, 2.5, 5.0, 7.5, 10.0]
    assert Axis(low=3, high=70, begin=0, end=100, log=True).ticks(4) == [5, 10, 20, 50]


def test_numbers_have_three_digits_and_a_fitting_unit() -> None:
    assert [seconds_text(s) for s in (0, 1.25e-5, 0.34, 0.99999, 25.24, 250.4)] == [
        "0 s", "12.5 µs", "340 ms", "1.00 s", "25.2 s", "4 min 10 s",
    ]  # fmt: skip
    assert scaled_text(4.234e12, "B/s") == "4.23 TB/s"
    assert scaled_text(12, "B") == "12.0 B"
    assert scaled_text(0, "FLOP") == "0 FLOP"
    assert [percent_text(r) for r in (0, 0.004, 0.42, 1.3)] == ["0 %", "0.4 %", "42 %", "130 %"]
    assert times_text(24.81) == "24.8×"
    assert short_text(250_000) == "250k"
    assert short_text(1e6) == "1M"
    assert three(12_345.6) == "12,346"
