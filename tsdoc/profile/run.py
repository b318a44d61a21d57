"""One `tsdoc profile`, from a request to a report."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tsdoc.errors import ResourceError, StoreError
from tsdoc.home import Home
from tsdoc.kernels.devices import Device, resolve_device
from tsdoc.kernels.timing import make_timer
from tsdoc.profile.bench import Bench, kv_bytes, set_up, warm_up
from tsdoc.profile.counts import traffic
from tsdoc.profile.decode import decode_kernels, decode_runs, theta_curve
from tsdoc.profile.disk import leave_page_cache, read_rate
from tsdoc.profile.full import compare_full
from tsdoc.profile.keep import check_room, measure_keep, temporary_home
from tsdoc.profile.machine import describe_machine
from tsdoc.profile.prefill import measure_prefill, prefill_kernels
from tsdoc.profile.prompt import ProfilePrompt, make_prompt
from tsdoc.profile.request import ProfileRequest
from tsdoc.profile.results import (
    Ceilings,
    DecodeRun,
    FromDisk,
    Full,
    Kept,
    Kernel,
    PrefillResult,
    Report,
    SweepRow,
    Warm,
)
from tsdoc.profile.roofline import measure_ceilings
from tsdoc.profile.sweep import run_sweep
from tsdoc.profile.warm import WarmStartError, measure_warm
from tsdoc.progress import Reporter
from tsdoc.session.calibration import PeakMemory
from tsdoc.settings import Settings

LONG_S = 60.0  # a prefill of more is announced

ALL_ATTENDED = (
    "The prompt fits the budget: every token is attended to, nothing is selected, and no cache is "
    "looked up. Longer prompts show more."
)


def run_profile(
    request: ProfileRequest, *, settings: Settings, home: Home, reporter: Reporter
) -> Report:
    """Measures everything that the request asks for.

    Nothing stays on the disk but what reading the sources and locating the model leave there.

    Raises:
        TsdocError: a source or the model cannot be had, or memory does not suffice. What concerns
            the store alone is a note in the report.
    """
    settings.parallel.refuse("tsdoc profile")
    device = resolve_device(settings.engine.device)
    prompt = make_prompt(request, settings, home, device, reporter)
    reporter.finish()
    with ExitStack() as resources:
        watch = resources.enter_context(PeakMemory())
        place = _place(prompt, settings, home, reporter, resources)
        measured = _measure(request, settings, prompt, device, place.directory, reporter)
        gc.collect()
        make_timer(torch.device(device)).release()  # the new process needs the memory
        warm = from_disk = None
        if measured.kept is not None and place.directory is not None:
            warm = _warm(prompt, settings, device, place, reporter)
            from_disk = _from_disk(prompt, settings, device, place, reporter)
    if all(run.hit_ratio is None for run in measured.decode):
        place.notes.append(ALL_ATTENDED)
    selection = settings.selection.model_dump()
    return Report(
        model=prompt.name,
        random_weights=request.random_weights,
        source=prompt.source,
        num_tokens=len(prompt.ids),
        num_layers=prompt.config.num_layers,
        command=request.command,
        machine=describe_machine(device),
        device=device,
        compute_dtype=prompt.compute_dtype,
        kv_dtype=settings.engine.kv_dtype,
        kv_bytes_per_token=kv_bytes(prompt, settings) // len(prompt.ids),
        selection={**selection, "prefill_block": settings.engine.prefill_block},
        theta=settings.engine.theta,
        ceilings=measured.ceilings,
        cold_s={
            "start": request.start_up_s,
            **prompt.times_s,
            "model_load": measured.load_s,
            "prefill": measured.prefill.seconds,
            "first_token": _default_run(measured.decode).first_token_s,
        },
        prefill=measured.prefill,
        decode=measured.decode,
        theta_curve=measured.curve,
        kernels=measured.kernels,
        host_peak_bytes=watch.peak_bytes,
        device_peak_bytes=measured.device_peak_bytes,
        kept=measured.kept,
        warm=warm,
        from_disk=from_disk,
        full=measured.full,
        sweeps=measured.sweeps,
        notes=tuple(place.notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where K and V may be written; notes say why something is not measured, or not there."""

    directory: Path | None
    notes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What this process measured."""

    ceilings: Ceilings
    load_s: float
    prefill: PrefillResult
    decode: tuple[DecodeRun, ...]
    curve: tuple[DecodeRun, ...]
    kernels: tuple[Kernel, ...]
    device_peak_bytes: int | None
    full: Full | None
    sweeps: tuple[SweepRow, ...]
    kept: Kept | None


def _place(
    prompt: ProfilePrompt, settings: Settings, home: Home, reporter: Reporter, resources: ExitStack
) -> _Place:
    """A directory for the profile's own store, unless there is to be none or no room."""
    if not settings.store.enabled:
        return _Place(
            directory=None, notes=["Without a store (--no-store), nothing was written or reopened."]
        )
    try:
        directory = resources.enter_context(temporary_home(home))
        check_room(directory, kv_bytes(prompt, settings))
    except (ResourceError, StoreError) as error:
        reporter.warn("not_kept", error.where or "", f"{error.message}; that is not measured")
        return _Place(directory=None, notes=[f"Not written, {error.where}: {error.message}."])
    return _Place(directory=directory, notes=[])


def _measure(
    request: ProfileRequest,
    settings: Settings,
    prompt: ProfilePrompt,
    device: Device,
    directory: Path | None,
    reporter: Reporter,
) -> _Measured:
    """Everything that needs the model in this process; its memory is free again afterwards."""
    dtype = torch.float32 if prompt.compute_dtype == "float32" else torch.bfloat16
    target = torch.device(device)
    if settings.engine.threads is not None:
        torch.set_num_threads(settings.engine.threads)
    with _stage(reporter, "measuring the machine"):
        ceilings = measure_ceilings(target, dtype, make_timer(target))
    with _stage(reporter, "loading the model"):
        begun = time.perf_counter()
        bench = set_up(prompt, settings, device)
        bench.timer.synchronise()
        load_s = time.perf_counter() - begun
    bench.timer.reset_peak()
    with _stage(reporter, "compiling and warming up"):
        begun = time.perf_counter()
        warm_up(bench)
        warm_up_s = time.perf_counter() - begun
    with _stage(reporter, "prefill", bench.num_tokens):
        prefill = measure_prefill(bench, warm_up_s, _announcing(reporter, bench.num_tokens))
    with _stage(reporter, "decode"):
        decode = decode_runs(bench, _renaming(reporter, "decode"))
    peak = bench.timer.peak_bytes()
    with _stage(reporter, "decode at several thetas"):
        curve = theta_curve(bench, _renaming(reporter, "decode"))
    with _stage(reporter, "kernels one by one"):
        counted = traffic(
            device,
            prompt.compute_dtype,
            settings.engine.kv_dtype,
            narrow_steps=bench.steps is not None,
        )
        kernels = prefill_kernels(bench, prefill, counted, ceilings)
        kernels += decode_kernels(bench, counted, ceilings)
    kept = _keep(bench, directory, reporter) if directory is not None else None
    full = None
    if request.compare_full:
        with _stage(reporter, "full attention"):
            full = compare_full(bench, prefill, decode[0], kernels, reporter)
            if full.measured and request.sweeps:  # K and V of the sweeps are the selection's again
                bench.prefill(bench.engine(), bench.num_tokens)
    sweeps: list[SweepRow] = []
    for option in request.sweeps:
        with _stage(reporter, f"sweep of {option}"):
            sweeps += run_sweep(bench, option, _renaming(reporter, "sweep"))
    return _Measured(
        ceilings=ceilings,
        load_s=load_s,
        prefill=prefill,
        decode=decode,
        curve=curve,
        kernels=tuple(kernels),
        device_peak_bytes=peak,
        full=full,
        sweeps=tuple(sweeps),
        kept=kept,
    )


def _keep(bench: Bench, directory: Path, reporter: Reporter) -> Kept | None:
    """Writes K and V; a store that fails is a warning, since all else is measured."""
    with _stage(reporter, "writing K and V", bench.num_tokens):
        try:
            kept = measure_keep(bench, directory / "store", reporter.advance)
        except (ResourceError, StoreError) as error:
            reporter.warn("not_kept", error.where or "", error.message)
            return None
    np.save(directory / "ids.npy", bench.prompt.ids)
    return kept


def _warm(
    prompt: ProfilePrompt, settings: Settings, device: Device, place: _Place, reporter: Reporter
) -> Warm | None:
    assert place.directory is not None  # noqa: S101 - asked before
    with _stage(reporter, "a new process"):
        try:
            return measure_warm(
                prompt,
                settings,
                device,
                store=place.directory / "store",
                ids=place.directory / "ids.npy",
            )
        except WarmStartError as error:
            reporter.warn("warm_start", "", error.message)
            place.notes.append(f"Not measured: {error.message}.")
            return None


def _from_disk(
    prompt: ProfilePrompt, settings: Settings, device: Device, place: _Place, reporter: Reporter
) -> FromDisk | None:
    """The new process again, with an empty page cache."""
    assert place.directory is not None  # noqa: S101 - asked before
    store = place.directory / "store"
    with _stage(reporter, "the disk"):
        try:
            rate = _rate_of_empty_cache(store)
        except StoreError as error:
            reporter.warn("from_disk", error.where or "", error.message)
            place.notes.append(f"From the disk: not measured, {error.where}: {error.message}.")
            return None
    if rate is None:
        place.notes.append("From the disk: not measured, the page cache keeps what is read.")
        return None
    start = _warm(prompt, settings, device, place, reporter)
    if start is None:
        return None
    num_bytes = kv_bytes(prompt, settings)
    return FromDisk(start=start, num_bytes=num_bytes, disk_bytes_per_s=rate)


def _rate_of_empty_cache(store: Path) -> float | None:
    """What the disk gives of K and V, in bytes per second; the page cache is empty afterwards.

    None where it cannot be emptied.
    """
    if not leave_page_cache(store):
        return None
    rate = read_rate(max(store.rglob("kv.bin"), key=lambda path: path.stat().st_size))
    return rate if leave_page_cache(store) else None


def _default_run(runs: tuple[DecodeRun, ...]) -> DecodeRun:
    """The run under the settings' own threshold; with the cache off, the one that selects."""
    return next((run for run in runs if run.name.startswith("default")), runs[0])


@contextmanager
def _stage(reporter: Reporter, name: str, num_tokens: int | None = None) -> Iterator[None]:
    reporter.start(name, num_tokens, "tokens" if num_tokens else "steps")
    try:
        yield
    finally:
        reporter.finish()


def _announcing(reporter: Reporter, num_tokens: int) -> Callable[[int], None]:
    """Shows progress; says once, after the first block, how long a long prefill will take."""
    begun, said = time.perf_counter(), False

    def advance(end: int) -> None:
        nonlocal said
        reporter.advance(end)
        left_s = (num_tokens - end) * (time.perf_counter() - begun) / end
        if not said and left_s > LONG_S:
            reporter.note(f"prefill of {num_tokens:,} tokens: about {left_s / 60:.0f} min more")
        said = True

    return advance


def _renaming(reporter: Reporter, stage: str) -> Callable[[str], None]:
    """Shows which part of a stage has begun."""
    return lambda part: reporter.start(f"{stage}: {part}", None, "steps")
