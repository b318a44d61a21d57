"""The page of a profile: key figures, charts, tables."""

from __future__ import annotations

from typing import Any

from tsdoc.profile.figures import (
    chunk_figure,
    cold_figure,
    decode_figure,
    full_figure,
    parts_figure,
    roofline_figure,
    speed_figure,
    sweep_figures,
    theta_figures,
    time_figure,
    warm_figure,
)
from tsdoc.profile.output import report_json
from tsdoc.profile.results import DecodeRun, Report
from tsdoc.report import render_page
from tsdoc.report.numbers import percent_text, scaled_text, seconds_text, three, times_text

Rows = list[tuple[str, ...]]


def profile_page(report: Report) -> str:
    """Returns the page as one HTML file."""
    return render_page(
        "profile",
        title=f"{report.model}: {report.num_tokens:,} tokens",
        data=report_json(report),
        lead=_lead(report),
        tiles=_tiles(report),
        cold=cold_figure(report),
        warm=warm_figure(report),
        parts=parts_figure(report),
        time=time_figure(report),
        speed=speed_figure(report),
        decode=decode_figure(report),
        decode_rows=[_decode_row(run) for run in report.decode],
        theta=theta_figures(report),
        roofline=roofline_figure(report),
        kernel_rows=_kernel_rows(report),
        above_ceilings=report.above_ceilings,
        full=full_figure(report),
        chunk=chunk_figure(report),
        sweeps=sweep_figures(report),
        store_rows=_store_rows(report),
        setting_rows=_setting_rows(report),
        ceilings=(
            scaled_text(report.ceilings.copy_bytes_per_s, "B/s"),
            f"{scaled_text(report.ceilings.flops_per_s, 'FLOP/s')} in {report.ceilings.dtype}",
        ),
        warm_up=seconds_text(report.prefill.warm_up_s) if report.prefill.warm_up_s > 0.1 else "",
    )


def _lead(report: Report) -> str:
    machine = report.machine
    device = machine.gpu or f"{machine.cpu}, {machine.num_cores} cores"
    weights = "random weights" if report.random_weights else "real weights"
    return (
        f"{report.source}; {weights}; {device}; {report.compute_dtype}, K and V {report.kv_dtype}"
    )


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """(figure, unit, what it is)."""
    default = report.decode[1] if len(report.decode) == 3 else report.decode[0]
    tiles = [_split(seconds_text(report.first_token_cold_s), "to the first token, from nothing")]
    if report.warm is not None:
        tiles.append(
            _split(
                seconds_text(report.warm.first_token_s), "the same in a new process, K and V kept"
            )
        )
    tiles.append((f"{report.prefill.tokens_per_s:,.0f}", "", "tokens per second, prefill"))
    tiles.append((three(default.p50_ms), "ms", f"per generated token, {default.name}"))
    if report.full is not None:
        about = "" if report.full.measured else "about "
        tiles.append(
            (
                times_text(report.full.prefill_speedup),
                "",
                f"{about}as fast a prefill as full attention",
            )
        )
    peak = report.device_peak_bytes or report.host_peak_bytes
    where = "device" if report.device_peak_bytes else "host"
    tiles.append(_split(scaled_text(peak, "B"), f"peak of the {where}'s memory"))
    return tiles


def _split(text: str, what: str) -> tuple[str, str, str]:
    number, _, unit = text.partition(" ")
    return (text, "", what) if unit.count(" ") else (number, unit, what)


def _decode_row(run: DecodeRun) -> tuple[str, ...]:
    hits = "–" if run.hit_ratio is None else percent_text(run.hit_ratio)
    return (
        run.name,
        f"{three(run.p50_ms)} ms",
        f"{three(run.p95_ms)} ms",
        three(1e3 / run.p50_ms),
        hits,
        seconds_text(run.first_token_s),
    )


def _kernel_rows(report: Report) -> Rows:
    return [
        (
            kernel.phase,
            kernel.name,
            seconds_text(kernel.seconds),
            scaled_text(kernel.num_bytes, "B"),
            scaled_text(kernel.num_flops, "FLOP"),
            seconds_text(kernel.floor_s),
            percent_text(kernel.share),
        )
        for kernel in report.kernels
    ]


def _store_rows(report: Report) -> Rows:
    rows: Rows = [("Peak of the host's memory", scaled_text(report.host_peak_bytes, "B"))]
    if report.device_peak_bytes is not None:
        rows.append(("Peak of the device's memory", scaled_text(report.device_peak_bytes, "B")))
    if report.kept is not None:
        kept = report.kept
        rate, disk = scaled_text(kept.bytes_per_s, "B/s"), scaled_text(kept.disk_bytes_per_s, "B/s")
        rows += [
            ("K and V of the prompt", scaled_text(kept.num_bytes, "B")),
            ("Written, with checksums and fsync", f"{seconds_text(kept.write_s)}, {rate}"),
            ("Beside the disk's own rate", f"{percent_text(kept.ratio)} of {disk}"),
            ("Opened", seconds_text(kept.open_s)),
        ]
    if report.warm is not None:
        after = seconds_text(report.warm.after_weights_s)
        rows.append(("First token after the weights, new process", after))
    if report.from_disk is not None:
        found = report.from_disk
        after = seconds_text(found.start.after_weights_s)
        rate = scaled_text(found.disk_bytes_per_s, "B/s")
        rows.append(("The same, nothing in the page cache", f"{after}; the disk reads {rate}"))
    return rows


def _setting_rows(report: Report) -> Rows:
    machine = report.machine
    rows: Rows = [
        (
            "CPU",
            f"{machine.cpu}, {machine.num_cores} cores, {scaled_text(machine.memory_bytes, 'B')}",
        )
    ]
    if machine.gpu is not None:
        rows.append(("GPU", f"{machine.gpu}, {scaled_text(machine.gpu_bytes or 0, 'B')}"))
    rows.append(("System", machine.system))
    rows.append(("Versions", ", ".join(f"{k} {v}" for k, v in machine.versions.items())))
    settings: dict[str, Any] = {**report.selection, "theta": report.theta}
    rows.append(("Settings", ", ".join(f"{k} {v}" for k, v in settings.items())))
    rows.append(("K and V", f"{report.kv_bytes_per_token:,} bytes per token"))
    return rows
