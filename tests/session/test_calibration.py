"""What this machine was measured to do, and what is said of it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.session.conftest import TEXT, Recorder
from tsdoc.home import Home
from tsdoc.kernels.memory_plan import MemoryPlan, plan_memory
from tsdoc.kernels.torch_cache import TorchBackend
from tsdoc.session import Session
from tsdoc.session.calibration import MAX_MEASURED, Calibration, PeakMemory, read_all
from tsdoc.session.forecast import Forecast, describe_plan
from tsdoc.session.results import Estimate

Start = Callable[..., Session]


def calibration(home: Home, **changes: str) -> Calibration:
    return Calibration(
        **{"home": home, "model_key": "ab" * 16, "device": "cpu", "threads": 2, **changes}  # type: ignore[arg-type]
    )


def estimate(prefill_s: float | None) -> Estimate:
    return Estimate(
        prompt_tokens=100_000,
        reused_tokens=20_000,
        prefill_tokens=80_000,
        prefill_s=prefill_s,
        kv_bytes=1_300_000_000,
        free_disk_bytes=40_000_000_000,
        memory_bytes=700_000_000 if prefill_s else None,
        memory_tokens=100_000 if prefill_s else 0,
    )


def test_a_measured_rate_is_known_to_the_next_process_for_this_model_and_device(home: Home) -> None:
    calibration(home).note(4096, 40.96, memory_bytes=5_000, prompt_tokens=4096)
    known = calibration(home).read()
    assert known is not None
    assert (known.tokens_per_s, known.memory_bytes) == (100.0, 5_000)
    assert calibration(home, device="cuda").read() is None
    assert calibration(home, model_key="cd" * 16).read() is None
    assert (home.root / "calibration.json").stat().st_mode & 0o777 == 0o600


def test_a_rate_is_the_mean_of_the_last_and_what_was_known(home: Home) -> None:
    for seconds in (10.0, 20.0):
        calibration(home).note(1000, seconds, memory_bytes=1, prompt_tokens=1000)
    known = calibration(home).read()
    assert known is not None
    assert known.tokens_per_s == 75.0


def test_memory_is_that_of_the_longest_prompt_that_was_kept_on_disk(home: Home) -> None:
    def note(prompt_tokens: int, memory_bytes: int | None) -> tuple[int | None, int]:
        calibration(home).note(1000, 1.0, memory_bytes=memory_bytes, prompt_tokens=prompt_tokens)
        known = calibration(home).read()
        assert known is not None
        return known.memory_bytes, known.memory_tokens

    assert note(9000, None) == (None, 0)
    assert note(5000, 700) == (700, 5000)
    assert note(1000, 300) == (700, 5000)
    assert note(90_000, None) == (700, 5000)
    assert note(5000, 600) == (600, 5000)
    assert note(8000, 900) == (900, 8000)


@pytest.mark.parametrize(
    ("memory_tokens", "kept", "said"),
    [(100_000, True, "up to"), (99_999, True, "at least"), (100_000, False, "at least")],
)
def test_memory_of_a_shorter_prompt_is_no_estimate_of_a_longer_one(
    home: Home, memory_tokens: int, kept: bool, said: str
) -> None:
    reporter = Recorder()
    reporter.start("prefill", 100_000, "tokens")
    known = replace(estimate(1200.0), memory_tokens=memory_tokens)
    with Forecast(known, calibration(home), reporter, kept=kept):
        assert f", {said} 700.0 MB of memory" in reporter.notes[0]


def test_a_few_tokens_say_nothing(home: Home) -> None:
    calibration(home).note(100, 1.0, memory_bytes=1, prompt_tokens=100)
    assert calibration(home).read() is None
    assert not home.root.exists()


def test_the_file_does_not_grow_without_end(home: Home) -> None:
    for number in range(MAX_MEASURED + 5):
        calibration(home, model_key=f"{number:032x}").note(
            1000, 1.0, memory_bytes=1, prompt_tokens=1000
        )
    assert len(read_all(home)) == MAX_MEASURED
    assert calibration(home, model_key=f"{0:032x}").read() is None


@pytest.mark.parametrize("damage", [b"", b"{}", b"nonsense", b"\xff" * 100])
def test_a_damaged_file_is_as_if_nothing_were_known(home: Home, damage: bytes) -> None:
    calibration(home).note(1000, 1.0, memory_bytes=1, prompt_tokens=1000)
    (home.root / "calibration.json").write_bytes(damage)
    assert calibration(home).read() is None
    calibration(home).note(1000, 1.0, memory_bytes=1, prompt_tokens=1000)
    assert calibration(home).read() is not None


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    calibration(Home(tmp_path / "file" / "home")).note(
        1000, 1.0, memory_bytes=1, prompt_tokens=1000
    )


def test_a_long_prefill_is_said_before_it_begins_and_compared_afterwards(home: Home) -> None:
    reporter = Recorder()
    reporter.start("prefill", 100_000, "tokens")
    with Forecast(
        estimate(1200.0), calibration(home), reporter, kept=True, narrowing="--section"
    ) as forecast:
        (before,) = reporter.notes
        forecast.advance(100_000)
    assert before.startswith("80,000 tokens to read: about 20 min at 67 tokens/s, 1.3 GB of disk")
    end = "(40.0 GB still free), up to 700.0 MB of memory; Ctrl-C is safe; --section reads less"
    assert before.endswith(end)
    assert reporter.notes[1].startswith("read 80,000 tokens in 0 s (20 min estimated)")
    assert forecast.outcome is not None
    known = calibration(home).read()
    assert known is not None
    assert known.memory_bytes == forecast.outcome.memory_bytes > 0


CAPPED = plan_memory(
    total_bytes=24_000_000_000,
    free_bytes=8_800_000_000,
    kv_bytes=60_000_000_000,
    stage_bytes=2_100_000_000,
    index_bytes=1_900_000_000,
    may_move=True,
)


def test_where_a_gpus_memory_is_limited_what_lies_in_it_is_said(home: Home) -> None:
    reporter = Recorder()
    reporter.start("prefill", 100_000, "tokens")
    limited = replace(estimate(1200.0), device=CAPPED)
    with Forecast(limited, calibration(home), reporter, kept=True):
        assert reporter.notes[1] == (
            "22.4 GB of 24.0 GB of the GPU's memory: 15.2 GB for the weights, 1.9 GB for the key "
            "index, 2.1 GB for keys of two layers, 3.2 GB for the work; K and V, 60.0 GB, go to "
            "the machine's own memory"
        )
    roomy = replace(CAPPED, on_host=False, stage_bytes=0, index_bytes=0, kv_bytes=5_000_000_000)
    assert describe_plan(roomy) == (
        "23.4 GB of 24.0 GB of the GPU's memory: 15.2 GB for the weights, 5.0 GB for K and V, "
        "3.2 GB for the work"
    )


def test_a_limited_device_is_asked_for_its_plan_before_the_prefill(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend of the CPU that plans as one of a GPU does."""
    asked: list[int] = []

    class Limited(TorchBackend):
        def memory_plan(self, num_tokens: int) -> MemoryPlan:
            asked.append(num_tokens)
            return CAPPED

    monkeypatch.setattr("tsdoc.kernels.torch_cache.TorchBackend", Limited)
    reporter = Recorder()
    with start(reporter, engine={"index": "none"}) as session:
        prepared = session.prepare()
    assert prepared.estimate.device == CAPPED
    assert asked == [prepared.prompt_tokens]
    assert any("without index=none" in note for note in reporter.notes)
    with start() as session:
        assert session.prepare().estimate.device is None  # there was nothing to compute


def test_a_short_one_is_not_worth_a_word(home: Home) -> None:
    reporter = Recorder()
    reporter.start("prefill", 100_000, "tokens")
    with Forecast(estimate(30.0), calibration(home), reporter, kept=True) as forecast:
        forecast.advance(100_000)
    assert reporter.notes == []


def test_an_unknown_machine_is_measured_on_the_first_block(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = Recorder()
    reporter.start("prefill", 100_000, "tokens")
    clock = iter([0.0, 100.0, 101.0])
    with monkeypatch.context() as patches:
        patches.setattr(time, "perf_counter", lambda: next(clock))
        with Forecast(estimate(None), calibration(home), reporter, kept=False) as forecast:
            assert reporter.notes == []
            forecast.advance(24_096)
            assert reporter.notes[0].startswith(
                "75,904 tokens to read: about 31 min at 41 tokens/s;"
            )
            assert reporter.notes[0].endswith("nothing is kept")
            forecast.advance(100_000)
    (_, after) = reporter.notes
    assert after.startswith("read 80,000 tokens in 101 s (33 min estimated)")  # 100 s and 31 min


def test_the_first_block_of_a_gpu_which_compiles_kernels_is_no_measure(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = Recorder()
    reporter.start("prefill", 100_000, "tokens")
    clock = iter([0.0, 20.0, 21.0, 22.0])
    with monkeypatch.context() as patches:
        patches.setattr(time, "perf_counter", lambda: next(clock))
        gpu = calibration(home, device="cuda")
        with Forecast(estimate(None), gpu, reporter, kept=True) as forecast:
            forecast.advance(24_096)  # 4,096 tokens in 20 s, which would be 6 min for the rest
            forecast.advance(62_048)
            forecast.advance(100_000)
    assert reporter.notes == []
    known = gpu.read()
    assert known is not None
    assert known.tokens_per_s == pytest.approx(75_904 / 2)


def test_an_interrupted_prefill_is_measured_up_to_its_last_block(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = Recorder()
    reporter.start("prefill", 100_000, "tokens")
    now = 0.0
    with monkeypatch.context() as patches:
        patches.setattr(time, "perf_counter", lambda: now)
        with (
            pytest.raises(KeyboardInterrupt),
            Forecast(estimate(None), calibration(home), reporter, kept=True) as forecast,
        ):
            now = 0.1
            forecast.advance(24_096)
            now = 0.4
            raise KeyboardInterrupt
    assert forecast.outcome is None
    known = calibration(home).read()
    assert known is not None
    assert known.tokens_per_s == pytest.approx(4096 / 0.1)


def test_memory_is_watched_by_what_the_process_has_for_itself() -> None:
    """Not malloc's, which could hand out what was there already, nor at a fixed moment."""

    def wait_for(num_bytes: int) -> None:
        give_up = time.monotonic() + 60
        while memory.peak_bytes < num_bytes and time.monotonic() < give_up:
            time.sleep(0.01)

    with PeakMemory() as memory:
        wait_for(1)  # it has looked once
        before = memory.peak_bytes
        assert before > 0
        # Much, since the process may give back some of its own meanwhile.
        with mmap.mmap(-1, 200_000_000, mmap.MAP_PRIVATE) as block:
            for at in range(0, len(block), mmap.PAGESIZE):
                block[at] = 1
            wait_for(before + 100_000_000)
    assert memory.peak_bytes >= before + 100_000_000


def test_a_second_document_is_estimated_from_the_first(start: Start, document: Path) -> None:
    with start() as session:
        assert session.estimate().prefill_s is None
        first = session.prepare()
    assert first.outcome is not None
    assert first.estimate.prefill_tokens == first.computed_tokens
    document.write_text("Another text.\n" + TEXT, encoding="utf-8")
    with start() as session:
        guess = session.estimate()
        second = session.prepare()
    assert guess.prefill_s is not None
    assert guess.memory_bytes == first.outcome.memory_bytes
    free = second.estimate.free_disk_bytes  # less than at first: the space is reserved
    assert second.estimate == replace(guess, free_disk_bytes=free)
    with start() as session:
        again = session.prepare()
    assert (again.outcome, again.estimate.prefill_s, again.computed_tokens) == (None, 0.0, 0)
