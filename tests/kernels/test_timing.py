"""Marks, repetitions and peaks of the devices there are."""

from __future__ import annotations

import time

import pytest
import torch

from tsdoc.kernels.timing import HostTimer, Timer, make_timer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def test_marks_enclose_the_work_between_them(device: torch.device) -> None:
    timer = make_timer(device)
    x = torch.randn(512, 512, device=device)
    long, short = [], []
    for _ in range(5):  # the shortest of five: other work may come between two marks
        first = timer.mark()
        for _ in range(20):
            x = (x @ x).clamp(-1, 1)
        second, third = timer.mark(), timer.mark()
        seconds = timer.seconds([(first, second), (second, third)])
        long.append(seconds[0])
        short.append(seconds[1])
    assert 0 <= min(short) < min(long)


def test_calls_are_repeated_until_the_limit(device: torch.device) -> None:
    timer, x = make_timer(device), torch.zeros(1, device=device)
    times = timer.repeat(lambda: x.add_(1), limit_s=60.0, most=5)
    assert len(times) == 5
    assert all(seconds >= 0 for seconds in times)
    assert len(timer.repeat(lambda: x.add_(1), limit_s=0.0)) == 1


def test_the_first_call_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lasting = 0.0, iter([200.0, 1.0, 2.0])

    def call() -> None:
        nonlocal now
        now += next(lasting)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert HostTimer().repeat(call, limit_s=10.0, most=2) == [1.0, 2.0]


def test_only_a_device_of_its_own_has_a_peak(device: torch.device) -> None:
    timer: Timer = make_timer(device)
    timer.reset_peak()
    block = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    timer.synchronise()
    peak = timer.peak_bytes()
    assert peak is None if device.type == "cpu" else (peak or 0) >= block.numel()
    timer.release()
