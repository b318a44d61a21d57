"""A whole profile of random weights: what it holds, and that nothing of it stays."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.profile.conftest import SHAPE, make_request, make_settings
from tests.session.conftest import Recorder
from tsdoc.errors import ResourceError, UsageError
from tsdoc.home import Home
from tsdoc.profile import keep, prompt, run
from tsdoc.profile.output import report_json
from tsdoc.profile.prompt import ProfilePrompt
from tsdoc.profile.results import PARTS, Report
from tsdoc.profile.run import ALL_ATTENDED, run_profile

Whole = tuple[Report, Recorder, Path]


def test_blocks_cover_the_prompt_and_their_parts_add_up(whole: Whole) -> None:
    prefill = whole[0].prefill
    assert [block.end for block in prefill.blocks] == [256, 512, 768, 1000]
    for block in prefill.blocks:
        assert sum(block.parts_s.values()) == pytest.approx(block.seconds, rel=1e-6)
    assert tuple(prefill.parts_s) == PARTS
    assert sum(prefill.parts_s.values()) == pytest.approx(prefill.seconds, rel=1e-6)
    assert sum(block.seconds for block in prefill.blocks) == pytest.approx(
        prefill.seconds, rel=0.05
    )


def test_the_thresholds_decide_the_hits(whole: Whole) -> None:
    every, default, hits = whole[0].decode
    assert (every.theta, every.hits) == (None, 0)
    assert default.theta == 0.9
    assert hits.hits == hits.lookups - 2  # the first step of each layer selects
    never, _ = whole[0].theta_curve
    assert never.hit_ratio
    assert never.hit_ratio > 0.5
    assert len(every.steps_ms) == 6


def test_each_kind_of_work_has_a_floor(whole: Whole) -> None:
    kernels = whole[0].kernels
    assert [kernel.phase for kernel in kernels] == ["prefill"] * 4 + ["decode"] * 3
    for kernel in kernels:
        assert kernel.seconds > 0
        assert kernel.floor_s > 0
        assert kernel.share == pytest.approx(kernel.floor_s / kernel.seconds)


def test_the_store_is_written_opened_and_found_by_a_new_process(whole: Whole) -> None:
    report = whole[0]
    assert report.kept is not None
    assert report.kept.num_bytes == 1000 * report.kv_bytes_per_token
    assert report.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2
    assert report.warm is not None
    assert list(report.warm.stages_s) == ["python", "imports", "model", "open", "first token"]
    assert all(seconds >= 0 for seconds in report.warm.stages_s.values())


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="needs Linux")
def test_the_new_process_is_measured_without_a_page_cache_too(whole: Whole) -> None:
    found, kept = whole[0].from_disk, whole[0].kept
    assert found is not None and kept is not None
    assert found.num_bytes == kept.num_bytes
    assert found.disk_bytes_per_s > 0
    needed_s = found.num_bytes / found.disk_bytes_per_s
    assert found.ratio == pytest.approx(found.start.after_weights_s / needed_s)


def test_nothing_stays_on_the_disk(whole: Whole) -> None:
    assert list(whole[2].iterdir()) == []


def test_full_attention_was_run_by_the_same_engine(whole: Whole) -> None:
    full = whole[0].full
    assert full is not None
    assert full.measured
    assert full.prefill_speedup == pytest.approx(full.prefill_s / whole[0].prefill.seconds)


def test_sweeps_have_a_row_per_value_or_say_why_not(whole: Whole) -> None:
    rows = {(row.option, row.value): row for row in whole[0].sweeps}
    assert len(rows) == 7
    assert rows["theta", -1.0].hit_ratio
    assert rows["theta", None].prefill_tokens_per_s is None
    assert rows["top_k", 128].prefill_tokens_per_s
    assert "no multiple" in (rows["chunk", 100.0].note or "")


def test_the_report_is_plain_json(whole: Whole) -> None:
    value = report_json(whole[0])
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert value["prompt_tokens"] == 1000
    assert value["decode"][0]["hit_ratio"] == 0


def test_stages_are_reported(whole: Whole) -> None:
    stages = whole[1].stages
    for stage in ("prefill", "decode", "writing K and V", "full attention", "a new process"):
        assert any(stage in said for said in stages), stage
    assert whole[1].warnings == []
    prefill, full = whole[1].notes
    assert prefill.startswith("prefill of 1,000 tokens: about 0 min")
    assert full.startswith("full attention over 1,000 tokens: about ")


def run_in(home: Path, **arguments: object) -> tuple[Report, Recorder]:
    recorder = Recorder()
    settings = arguments.pop("settings", make_settings())
    report = run_profile(
        make_request(**arguments),
        settings=settings,  # type: ignore[arg-type]
        home=Home(home),
        reporter=recorder,
    )
    return report, recorder


def test_without_a_store_nothing_is_written(tmp_path: Path) -> None:
    settings = make_settings(store={"enabled": False})
    report, recorder = run_in(tmp_path / "home", settings=settings, num_tokens=70)
    assert (report.kept, report.warm) == (None, None)
    assert "--no-store" in report.notes[0]
    assert not (tmp_path / "home").exists()
    assert report.theta_curve == ()  # everything fits the budget
    assert report.decode[0].hit_ratio is None
    assert report.notes[1] == ALL_ATTENDED
    assert "a new process" not in recorder.stages


def test_a_full_disk_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "free_bytes", lambda path: 1000)
    report, recorder = run_in(tmp_path / "home", num_tokens=100)
    assert report.kept is None
    assert recorder.warnings[0][0] == "not_kept"
    assert "GB are free" in report.notes[0]


def test_a_home_that_cannot_be_closed_to_others_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    monkeypatch.setattr(Path, "chmod", refuse)
    report, _ = run_in(home, num_tokens=70)
    assert report.kept is None
    assert report.notes[0] == (
        f"Not written, {home}: is open to other users and cannot be closed (Read-only file system)."
    )


def test_a_disk_that_cannot_be_read_leaves_the_rest(
    tmp_path: Path, make_prompt: Callable[..., ProfilePrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("tsdoc.profile.disk.os.fsync", refuse)
    place = run._Place(directory=tmp_path, notes=[])
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "kv.bin").write_bytes(b"K and V")
    recorder, settings = Recorder(), make_settings()
    prompt = make_prompt(settings, make_request())
    assert run._from_disk(prompt, settings, "cpu", place, recorder) is None
    assert recorder.warnings[0][0] == "from_disk"
    assert "Input/output error" in place.notes[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ResourceError("no room")])
def test_nothing_stays_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*arguments: object) -> None:
        assert list((tmp_path / "home").iterdir())
        raise error

    monkeypatch.setattr(run, "theta_curve", fail)
    with pytest.raises(type(error) if isinstance(error, Exception) else KeyboardInterrupt):
        run_in(tmp_path / "home", num_tokens=100)
    assert list((tmp_path / "home").iterdir()) == []


def test_what_a_killed_profile_left_is_removed(tmp_path: Path) -> None:
    stale = tmp_path / "profile-99999999-abc"
    stale.mkdir()
    (stale / "big").write_text("x")
    mine = tmp_path / "profile-notes"
    mine.mkdir()
    with keep.temporary_home(Home(tmp_path)) as directory:
        assert directory.parent == tmp_path
        assert not stale.exists()
        assert mine.exists()


def test_random_weights_need_a_shape_and_no_source(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shape"):
        run_in(tmp_path, settings=make_settings(model={"shape": None}))
    with pytest.raises(UsageError, match="tokenizer"):
        run_in(tmp_path, sources=("a.txt",))


def test_a_real_model_reads_sources(tmp_path: Path, model_directory: Path, document: Path) -> None:
    settings = make_settings(model={"source": str(model_directory), "shape": None})
    document.write_text(document.read_text("utf-8")[:1500], encoding="utf-8")
    report, _ = run_in(
        tmp_path / "home",
        settings=settings,
        sources=(str(document),),
        num_tokens=None,
        random_weights=False,
    )
    assert report.source == "facts.txt"
    assert report.notes == ()
    assert report.warm is not None
    assert {"ingest", "tokenise", "model_load", "prefill", "first_token"} <= set(report.cold_s)
    assert not (tmp_path / "home" / "store").exists()
    assert [path.name for path in (tmp_path / "home" / "records").iterdir()] == ["templates"]


@pytest.mark.parametrize("num_tokens", [100, 777])
def test_made_up_text_has_exactly_the_wanted_length(
    tmp_path: Path, model_directory: Path, num_tokens: int, make_prompt: Callable[..., object]
) -> None:
    settings = make_settings(model={"source": str(model_directory), "shape": None})
    prompt = make_prompt(settings, make_request(num_tokens=num_tokens, random_weights=False))
    assert len(prompt.ids) == num_tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize("of", ["made-up text", "random weights", "a source"])
def test_what_memory_cannot_hold_is_refused_before_it_is_made(
    of: str,
    tmp_path: Path,
    model_directory: Path,
    document: Path,
    make_prompt: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt, "make_text", None)
    monkeypatch.setattr(np, "resize", None)
    monkeypatch.setattr(np.random, "default_rng", lambda seed: None)
    source = "hf:example/small" if of == "random weights" else str(model_directory)
    request = make_request(
        num_tokens=10**11,
        random_weights=of == "random weights",
        sources=(str(document),) if of == "a source" else (),
    )
    with pytest.raises(ResourceError, match=r"100,000,000,000 tokens need .* GB of memory"):
        make_prompt(make_settings(model={"source": source}), request)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [4096, 5000])
def test_the_same_on_cuda(tmp_path: Path, num_tokens: int) -> None:
    sizes = {"num_hidden_layers": 3, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    settings = make_settings(
        model={"shape": {**SHAPE, **sizes}},
        engine={"device": "cuda", "prefill_block": 1024},
        selection={"n_init": 64, "n_local": 256, "top_k": 512, "chunk_size": 256},
    )
    report, recorder = run_in(
        tmp_path, settings=settings, num_tokens=num_tokens, compare_full=True, sweeps=("theta",)
    )
    assert recorder.warnings == []
    assert report.prefill.warm_up_s > 0
    assert report.prefill.blocks[-1].end == num_tokens
    assert all(kernel.seconds > 0 for kernel in report.kernels)
    assert report.device_peak_bytes
    assert report.kept is not None
    assert report.warm is not None
    assert report.full is not None
    assert not report.full.measured
    assert report.decode[-1].hit_ratio
    assert list(tmp_path.iterdir()) == []
