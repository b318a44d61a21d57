"""Time on a device: marks in its queue of work, repeated calls, peak memory.

Marks never make the host wait, so what is measured runs as it does unmeasured.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

CALIBRATION = 2  # calls before those that count
SPIN_CYCLES = 20_000_000  # the device is kept busy so long that the host gets ahead


class Timer(Protocol):
    """Measures one device.

    A mark is a point in the device's work: what was begun before it lies before it.
    """

    def mark(self) -> object:
        """Sets a mark."""

    def seconds(self, pairs: Sequence[tuple[object, object]]) -> list[float]:
        """Seconds between two marks each; waits for the device first."""

    def synchronise(self) -> None:
        """Returns when the device has finished what was begun."""

    def repeat(self, call: Callable[[], object], *, limit_s: float, most: int = 20) -> list[float]:
        """Seconds of each of up to `most` calls, stopping after about `limit_s`.

        A first call, uncounted, compiles and warms up. On CUDA the call is captured as a graph, so
        it must be the same launches every time, and the host's own part does not count.
        """

    def peak_bytes(self) -> int | None:
        """Most device memory in use since `reset_peak`; None where there is no separate one."""

    def reset_peak(self) -> None:
        """Forgets the peak."""

    def release(self) -> None:
        """Gives memory that nothing uses any more back to the device."""


class HostTimer:
    """See `Timer`: the CPU, which works in step with its host."""

    def mark(self) -> object:
        """See `Timer.mark`."""
        return time.perf_counter()

    def seconds(self, pairs: Sequence[tuple[object, object]]) -> list[float]:
        """See `Timer.seconds`."""
        return [_number(end) - _number(begin) for begin, end in pairs]

    def synchronise(self) -> None:
        """See `Timer.synchronise`."""

    def repeat(self, call: Callable[[], object], *, limit_s: float, most: int = 20) -> list[float]:
        """See `Timer.repeat`."""
        call()
        times: list[float] = []
        stop = time.perf_counter() + limit_s
        while len(times) < most and (not times or time.perf_counter() < stop):
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
        return times

    def peak_bytes(self) -> int | None:
        """See `Timer.peak_bytes`."""
        return None

    def reset_peak(self) -> None:
        """See `Timer.reset_peak`."""

    def release(self) -> None:
        """See `Timer.release`."""


class CudaTimer:
    """See `Timer`: events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> object:
        """See `Timer.mark`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch gives it no types
        event.record()
        return event

    def seconds(self, pairs: Sequence[tuple[object, object]]) -> list[float]:
        """See `Timer.seconds`."""
        self.synchronise()
        return [_event(begin).elapsed_time(_event(end)) / 1e3 for begin, end in pairs]

    def synchronise(self) -> None:
        """See `Timer.synchronise`."""
        torch.cuda.synchronize(self._device)

    def repeat(self, call: Callable[[], object], *, limit_s: float, most: int = 20) -> list[float]:
        """See `Timer.repeat`."""
        for _ in range(CALIBRATION):
            call()
        self.synchronise()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        self.synchronise()
        begun = time.perf_counter()
        graph.replay()
        self.synchronise()
        one_s = max(time.perf_counter() - begun, 1e-6)
        count = max(1, min(most, int(limit_s / one_s)))
        torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]  # nor this
        marks = [self.mark()]
        for _ in range(count):
            graph.replay()
            marks.append(self.mark())
        return self.seconds(list(itertools.pairwise(marks)))

    def peak_bytes(self) -> int | None:
        """See `Timer.peak_bytes`."""
        return int(torch.cuda.max_memory_allocated(self._device))

    def reset_peak(self) -> None:
        """See `Timer.reset_peak`."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release(self) -> None:
        """See `Timer.release`."""
        torch.cuda.empty_cache()


def make_timer(device: torch.device) -> Timer:
    """Returns the timer of a device."""
    return CudaTimer(device) if device.type == "cuda" else HostTimer()


def device_name(device: torch.device) -> str | None:
    """What the GPU is called; None for the CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_name(device))


def _number(mark: object) -> float:
    assert isinstance(mark, float)  # noqa: S101 - marks are made by the same timer
    return mark


def _event(mark: object) -> torch.cuda.Event:
    assert isinstance(mark, torch.cuda.Event)  # noqa: S101 - same
    return mark
