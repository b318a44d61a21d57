"""A profile's report as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tsdoc.cli.console import Terminal
from tsdoc.cli.tables import Column
from tsdoc.cli.wrapping import word_wrapped
from tsdoc.profile.figures import sweep_cells
from tsdoc.profile.results import DecodeRun, Report
from tsdoc.report.numbers import percent_text, scaled_text, seconds_text, three, times_text

BAR = 24
Rows = list[tuple[str, ...]]


def show_report(terminal: Terminal, report: Report) -> None:
    """Writes all sections, each a line and a table."""
    terminal.line(_heading(report))
    terminal.line(_where(report))
    for title, columns, rows in _sections(report):
        if rows:
            terminal.line()
            terminal.line(title)
            terminal.table(columns, rows)
    above = report.above_ceilings
    for note in [*([above] if above else []), *report.notes]:
        terminal.line()
        for line in word_wrapped(note, terminal.columns):
            terminal.line(line)


def _heading(report: Report) -> str:
    weights = " (random weights)" if report.random_weights else ""
    return f"{report.model}{weights}: {report.num_tokens:,} tokens, {report.source}"


def _where(report: Report) -> str:
    machine = report.machine
    device = machine.gpu or f"{machine.cpu}, {machine.num_cores} cores"
    return f"{device}; {report.compute_dtype}, K and V {report.kv_dtype}"


def _sections(report: Report) -> Iterator[tuple[str, Sequence[Column], Rows]]:
    stage = (
        Column(title="stage"),
        Column(title="time", right=True),
        Column(title="share", right=True),
        Column(title=""),
    )
    yield "First token, from nothing", stage, _shares(report.cold_s)
    if report.warm is not None:
        yield "First token, a new process that finds K and V", stage, _shares(report.warm.stages_s)
    prefill = report.prefill
    rate = f"{prefill.tokens_per_s:,.0f} tokens/s"
    warm_up = prefill.warm_up_s
    apart = f"; compiling and warming up before: {seconds_text(warm_up)}" if warm_up > 0.1 else ""
    yield f"Prefill: {rate}{apart}", stage, _shares(prefill.parts_s)
    yield "Decode", _DECODE, [_decode_row(run) for run in report.decode]
    yield "Selection Cache", _DECODE, [_decode_row(run) for run in report.theta_curve]
    ceilings = report.ceilings
    best = (
        f"{scaled_text(ceilings.copy_bytes_per_s, 'B/s')}, "
        f"{scaled_text(ceilings.flops_per_s, 'FLOP/s')} {ceilings.dtype}"
    )
    yield f"Share of the roofline ({best})", _KERNELS, _kernel_rows(report)
    yield "Store and memory", (Column(title="what"), Column(title="figure")), _storage_rows(report)
    if report.full is not None:
        yield "Full attention beside it", _FULL, _full_rows(report)
    for option in dict.fromkeys(row.option for row in report.sweeps):
        rows = [sweep_cells(row, missing="") for row in report.sweeps if row.option == option]
        yield f"Sweep of {option}", _SWEEP, rows


_DECODE = (
    Column(title="decode"),
    Column(title="p50 ms", right=True),
    Column(title="p95 ms", right=True),
    Column(title="tokens/s", right=True),
    Column(title="hits", right=True),
)
_KERNELS = (
    Column(title="phase"),
    Column(title="work", shrinks=True),
    Column(title="time", right=True),
    Column(title="floor", right=True),
    Column(title="share", right=True),
    Column(title="bound"),
)
_FULL = (
    Column(title="what"),
    Column(title="selection", right=True),
    Column(title="full", right=True),
    Column(title="faster", right=True),
)
_SWEEP = (
    Column(title="value", right=True),
    Column(title="prefill tokens/s", right=True),
    Column(title="decode ms", right=True),
    Column(title="hits", right=True),
    Column(title="", shrinks=True),
)


def _shares(parts_s: Mapping[str, float]) -> Rows:
    total = sum(parts_s.values()) or 1.0
    rows: Rows = [
        (
            name.replace("_", " "),
            seconds_text(seconds),
            percent_text(seconds / total),
            "█" * round(BAR * seconds / total),
        )
        for name, seconds in parts_s.items()
    ]
    return [*rows, ("total", seconds_text(total), "", "")]


def _decode_row(run: DecodeRun) -> tuple[str, ...]:
    hits = "" if run.hit_ratio is None else percent_text(run.hit_ratio)
    return (run.name, three(run.p50_ms), three(run.p95_ms), three(1e3 / run.p50_ms), hits)


def _kernel_rows(report: Report) -> Rows:
    return [
        (
            kernel.phase,
            kernel.name,
            seconds_text(kernel.seconds),
            seconds_text(kernel.floor_s),
            percent_text(kernel.share),
            kernel.bound,
        )
        for kernel in report.kernels
    ]


def _storage_rows(report: Report) -> Rows:
    rows: Rows = []
    if report.kept is not None:
        kept = report.kept
        size = scaled_text(kept.num_bytes, "B")
        rate, disk = scaled_text(kept.bytes_per_s, "B/s"), scaled_text(kept.disk_bytes_per_s, "B/s")
        rows += [
            (
                "K and V written",
                f"{size}, {seconds_text(kept.write_s)}",
            ),
            ("write rate", f"{rate}: {percent_text(kept.ratio)} of this disk's {disk}"),
            ("K and V opened", seconds_text(kept.open_s)),
        ]
    if report.warm is not None:
        after = seconds_text(report.warm.after_weights_s)
        rows.append(("first token after weights", f"{after} in a new process"))
    if report.from_disk is not None:
        found = report.from_disk
        after = seconds_text(found.start.after_weights_s)
        rate = scaled_text(found.disk_bytes_per_s, "B/s")
        rows.append(("… nothing cached", f"{after}; the disk reads {rate}"))
    rows.append(("peak of the host's memory", scaled_text(report.host_peak_bytes, "B")))
    if report.device_peak_bytes is not None:
        rows.append(("peak of the device's memory", scaled_text(report.device_peak_bytes, "B")))
    return rows


def _full_rows(report: Report) -> Rows:
    full = report.full
    if full is None:
        return []
    seconds, step = report.prefill.seconds, report.decode[0].p50_ms / 1e3
    about = "" if full.measured else "≈"
    return [
        (
            "prefill",
            seconds_text(seconds),
            about + seconds_text(full.prefill_s),
            times_text(full.prefill_speedup),
        ),
        (
            "decode, per token",
            seconds_text(step),
            about + seconds_text(full.decode_ms / 1e3),
            times_text(full.decode_speedup),
        ),
    ]
