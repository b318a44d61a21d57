"""What `tsdoc profile` asks of the library, and what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, FakeServices
from tsdoc.profile.request import ProfileRequest
from tsdoc.profile.results import (
    ABOVE_CEILINGS,
    Block,
    Ceilings,
    DecodeRun,
    Full,
    Kept,
    Kernel,
    Machine,
    PrefillResult,
    Report,
    SweepRow,
    Warm,
)

PARTS = {"linear": 12.0, "selection": 4.0, "attention": 6.0, "store": 1.0, "other": 2.0}


def decode_run(name: str, theta: float | None, ms: float, hits: int) -> DecodeRun:
    return DecodeRun(
        name=name, theta=theta, first_token_s=0.3, steps_ms=(ms, ms, 2 * ms), lookups=100, hits=hits
    )


def make_report(**changes: Any) -> Report:
    values: dict[str, Any] = {
        "model": "Small\x1b[31m",
        "random_weights": True,
        "source": "random token ids",
        "num_tokens": 1_048_576,
        "num_layers": 28,
        "command": "tsdoc profile --random-weights",
        "machine": Machine(
            cpu="AMD EPYC",
            num_cores=2,
            memory_bytes=24 << 30,
            gpu=None,
            gpu_bytes=None,
            system="Linux 6",
            versions={"tsdoc": "0.1.0", "torch": "2.13.0"},
        ),
        "device": "cpu",
        "compute_dtype": "float32",
        "kv_dtype": "bfloat16",
        "kv_bytes_per_token": 57_344,
        "selection": {"top_k": 2048, "chunk_size": 512},
        "theta": 0.9,
        "ceilings": Ceilings(copy_bytes_per_s=4.23e12, flops_per_s=8.1e14, dtype="bfloat16"),
        "cold_s": {"start": 2.0, "model_load": 3.0, "prefill": 25.0, "first_token": 0.3},
        "prefill": PrefillResult(
            num_tokens=1_048_576,
            block_tokens=524_288,
            seconds=25.0,
            warm_up_s=31.0,
            parts_s=PARTS,
            blocks=tuple(
                Block(end=524_288 * n, num_tokens=524_288, seconds=12.5, parts_s=PARTS)
                for n in (1, 2)
            ),
        ),
        "decode": (
            decode_run("selection on every step", None, 16.0, 0),
            decode_run("default (theta 0.9)", 0.9, 12.0, 40),
            decode_run("hits in all layers", -1.0, 4.4, 98),
        ),
        "theta_curve": (decode_run("theta 0.5", 0.5, 5.0, 90),),
        "kernels": (
            Kernel(
                name="linear layers",
                phase="prefill",
                seconds=12.0,
                num_bytes=1e12,
                num_flops=8.1e15,
                floor_s=10.0,
                bound="compute",
            ),
        ),
        "host_peak_bytes": 1_500_000_000,
        "device_peak_bytes": None,
        "kept": Kept(num_bytes=60_000_000_000, write_s=60.0, disk_bytes_per_s=1.1e9, open_s=0.004),
        "warm": Warm(
            stages_s={"python": 0.1, "imports": 4.0, "model": 3.0, "open": 0.1, "first token": 3.9}
        ),
        "full": Full(
            prefill_s=400.0,
            decode_ms=17.0,
            prefill_speedup=16.0,
            decode_speedup=1.06,
            samples=((1024, 0.1), (1_048_576, 12.0)),
            measured=False,
            method="Estimated.",
        ),
        "sweeps": (
            SweepRow(
                option="top_k",
                value=512,
                prefill_tokens_per_s=45_000.0,
                decode_ms=14.0,
                hit_ratio=0.4,
            ),
            SweepRow(option="top_k", value=8192, note="does not fit"),
        ),
    }
    return Report(**{**values, **changes})


@pytest.fixture
def asked(services: FakeServices, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every request and its settings; the answer is a made report."""
    seen: list[dict[str, Any]] = []

    def profile(request: ProfileRequest, **arguments: Any) -> Report:
        seen.append({"request": request, **arguments})
        return make_report()

    monkeypatch.setattr(services, "profile", profile, raising=False)
    return seen


def test_the_table_fits_80_columns(cli: Cli, asked: list[dict[str, Any]]) -> None:
    result = cli("profile", "--tokens", "1048576", terminal=True)
    assert result.code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = result.stdout
    for words in (
        "First token, from nothing",
        "Prefill: 41,943 tokens/s; compiling and warming up before: 31.0 s",
        "selection on every step    16.0",
        "linear layers  12.0 s  10.0 s   83 %  compute",
        "1.00 GB/s: 91 % of this disk's 1.10 GB/s",
        "≈6 min 40 s",
        "Sweep of top_k",
    ):
        assert words in text, words
    assert "\x1b" not in text
    assert r"Small\x1b[31m" in text


def test_a_share_above_100_percent_is_explained(
    cli: Cli, services: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(ratio: float) -> str:
        kept = Kept(num_bytes=10**9, write_s=1.0, disk_bytes_per_s=1e9 / ratio, open_s=0.1)
        report = make_report(kept=kept)
        monkeypatch.setattr(services, "profile", lambda *args, **options: report, raising=False)
        result = cli("profile", terminal=True)
        assert max(map(len, result.stdout.splitlines())) <= 80
        return " ".join(result.stdout.split())

    assert ABOVE_CEILINGS in shown(1.2)
    assert ABOVE_CEILINGS not in shown(1.004)  # shown as 100 %


def test_json_has_every_figure(cli: Cli, asked: list[dict[str, Any]]) -> None:
    value = cli("profile", "--json").json()
    assert value["schema"] == "tsdoc.profile/1"
    assert value["first_token"]["cold_s"] == pytest.approx(30.3)
    assert value["first_token"]["warm"]["after_weights_s"] == 4.0
    assert value["decode"][1]["hit_ratio"] == 0.4
    assert value["decode"][0]["p50_ms"] == 16.0
    assert value["kernels"][0]["roofline_ratio"] == pytest.approx(10 / 12)
    assert value["kv"]["disk_ratio"] == pytest.approx(1 / 1.1)
    assert value["full_attention"]["prefill_speedup"] == 16.0
    assert value["warnings"] == []


def test_a_page_is_written(cli: Cli, asked: list[dict[str, Any]], tmp_path: Path) -> None:
    result = cli("profile", "--html", "page.html")
    assert result.code == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert r"Small\x1b[31m" in page
    assert "page written: page.html" in result.stderr


def test_a_page_that_cannot_be_written_is_refused_before(
    cli: Cli, asked: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert cli("profile", "--html", "missing/page.html").code == 2
    assert cli("profile", "--html", str(tmp_path)).code == 2
    assert asked == []


def test_arguments_reach_the_library(cli: Cli, asked: list[dict[str, Any]]) -> None:
    result = cli(
        "profile", "book.pdf", "--tokens", "5000", "--compare", "full", "--sweep", "theta",
        "--sweep", "top_k", "--sweep", "theta", "--no-store", "--set", "top_k=512",
        "--pages", "2-3",
    )  # fmt: skip
    assert result.code == 0
    request, settings = asked[0]["request"], asked[0]["settings"]
    assert (request.sources, request.num_tokens) == (("book.pdf",), 5000)
    assert (request.compare_full, request.sweeps) == (True, ("theta", "top_k"))
    assert request.ingest.pages == ((2, 3),)
    assert not request.random_weights
    assert not settings.store.enabled
    assert settings.selection.top_k == 512


@pytest.mark.parametrize(
    "args", [("--sweep", "size"), ("--compare", "none"), ("--tokens", "1"), ("--tokens", "x")]
)
def test_what_cannot_be_is_a_usage_error(
    cli: Cli, asked: list[dict[str, Any]], args: tuple[str, ...]
) -> None:
    assert cli("profile", *args).code == 2
    assert asked == []
