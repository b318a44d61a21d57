"""The page of a profile: complete, hostile names harmless, nothing fetched."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.cli.test_profile import make_report
from tsdoc.profile.page import profile_page
from tsdoc.profile.results import ABOVE_CEILINGS

HOSTILE = "</script><script>alert(1)</script>\u2028"


def test_every_part_is_there() -> None:
    page = profile_page(make_report())
    for words in (
        "To the first token", "From nothing", "A new process that finds K and V", "Prefill",
        "What a token costs", "Speed as the prompt grows", "Full attention beside it",
        "Estimated.", "Decode", "Share of the roofline", "Sweep of top_k", "Store and memory",
        "Machine and settings", "tsdoc profile --random-weights", "does not fit",
    ):  # fmt: skip
        assert words in page, words
    assert page.count("<svg") >= 9


def test_a_share_above_the_ceiling_is_explained() -> None:
    assert ABOVE_CEILINGS not in profile_page(make_report())
    above = [replace(kernel, floor_s=13.0) for kernel in make_report().kernels]
    assert ABOVE_CEILINGS in profile_page(make_report(kernels=tuple(above)))


@pytest.mark.parametrize("field", ["model", "source", "command"])
def test_hostile_text_stays_text(field: str) -> None:
    page = profile_page(make_report(**{field: HOSTILE}))
    assert page.count("<script") == 2
    assert "&lt;script&gt;alert(1)" in page
    assert "\u2028" not in page
    assert not re.search(r"""(src|href)=|url\(|https?:""", page)


def test_parts_that_were_not_measured_are_left_out() -> None:
    page = profile_page(
        make_report(kept=None, warm=None, full=None, sweeps=(), theta_curve=(), notes=("Why not.",))
    )
    for words in ("A new process", "Full attention", "Sweep of", "threshold"):
        assert words not in page, words
    assert "Why not." in page
