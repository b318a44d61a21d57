"""Sessions on several processes: the answers and pages of one, whatever happens to a process."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.session.conftest import TEXT, Recorder
from tsdoc.engine.decoder import Decoder
from tsdoc.errors import RankError, UsageError
from tsdoc.eval.evaluate import evaluate
from tsdoc.eval.request import EvalRequest
from tsdoc.home import Home
from tsdoc.ingest.options import IngestOptions
from tsdoc.parallel.job import Shard
from tsdoc.parallel.leader import Leader
from tsdoc.parallel.processes import Processes
from tsdoc.progress import Silent
from tsdoc.session import Session, loading
from tsdoc.session.tail import Tail
from tsdoc.settings import ParallelSettings, Settings

QUESTION = "Which locker holds item 74?"


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "facts.txt"
    path.write_text("".join(TEXT.splitlines(keepends=True)[:40]), encoding="utf-8")
    return path


def say_nothing(text: str) -> None:
    """Takes an answer."""


def ask(session: Session) -> str:
    answer = session.ask(QUESTION, say_nothing, keep_queries=True)
    evidence = session.find_evidence(answer, count=3).evidence
    assert evidence is not None
    return f"{answer.text} {[passage.text for passage in evidence.passages]}"


def pages(home: Home) -> np.ndarray:
    (path,) = home.store.rglob("kv.bin")
    return np.fromfile(path, dtype=np.float32)


def leader_of(session: Session) -> Leader:
    loaded = session._engines._loaded
    assert loaded is not None
    leader = loaded.team.followers
    assert isinstance(leader, Leader)
    return leader


def children_of(leader: Leader) -> Sequence[Any]:
    processes = leader._processes
    assert isinstance(processes, Processes)
    return processes._children


EXACT = {"kv_dtype": "float32", "compute_dtype": "float32", "decode_weights": "float32"}
# Lines that are alike tie in the votes of a random model, and ranks round differently.
COVERING = {"top_k": 3000}


def test_any_number_of_processes_reads_what_any_other_wrote(
    start: Callable[..., Session], home: Home
) -> None:
    with start(engine=EXACT, selection=COVERING) as session:
        expected = ask(session)
        written = pages(home)
    with start(engine=EXACT, selection=COVERING, parallel={"tensor": 3}) as session:
        assert session.prepare().computed_tokens == 0
        assert ask(session) == expected
    shutil.rmtree(home.store)
    with start(engine=EXACT, selection=COVERING, parallel={"tensor": 2}) as session:
        assert session.prepare().computed_tokens > 0
        assert ask(session) == expected
        np.testing.assert_allclose(pages(home), written, atol=1e-3)
    with start(engine=EXACT, selection=COVERING) as session:
        assert session.prepare().computed_tokens == 0
        assert ask(session) == expected


def test_a_conversation_goes_on_after_a_process_was_lost(start: Callable[..., Session]) -> None:
    def talk(session: Session, tail: Tail, number: int) -> str:
        return session.ask(f"What holds locker {number}?", say_nothing, tail=tail).text

    tail = Tail()
    with start(engine=EXACT, selection=COVERING) as session:
        expected = [talk(session, tail, number) for number in (3, 5)]
    tail = Tail()
    with start(engine=EXACT, selection=COVERING, parallel={"tensor": 2}) as session:
        assert talk(session, tail, 3) == expected[0]
        (child,) = children_of(leader_of(session))
        child.kill()
        child.wait()
        assert talk(session, tail, 5) == expected[1]  # started anew: K and V are the leader's too
        (other,) = children_of(leader_of(session))
        assert other.pid != child.pid
    assert other.poll() is not None


@pytest.mark.parametrize("stage", ["load", "prefill", "between blocks", "answer"])
def test_a_process_that_ends_in_the_middle_ends_the_command(
    start: Callable[..., Session], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Leader.load
    children: list[Any] = []

    def kill_at_load(leader: Leader) -> Shard:
        children.extend(children_of(leader))
        if stage == "load":
            kill()
        return load(leader)

    def kill() -> None:
        children[-1].kill()
        if stage != "prefill":  # there, the next block may have begun
            children[-1].wait()

    class Killer(Recorder):
        def advance(self, done: int) -> None:
            if self.stages[-1] == "prefill" and done >= 512 and stage != "answer":
                kill()

    def take(text: str) -> None:
        if stage == "answer":
            kill()

    monkeypatch.setattr(Leader, "load", kill_at_load)
    with start(Killer(), engine=EXACT, parallel={"tensor": 3}) as session:
        with pytest.raises(RankError, match="rank 2 of 3 ended"):
            session.ask(QUESTION, take)
        assert all(child.poll() is not None for child in children)
    with start(engine=EXACT) as session:
        assert session.estimate().reused_tokens >= (0 if stage == "load" else 512)
        session.ask(QUESTION, say_nothing)


def test_a_long_computation_does_not_outlive_a_process(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, killed = Decoder.finish_layer, []

    def finish_slowly(decoder: Decoder, *args: Any) -> torch.Tensor:
        killed.append(time.monotonic())
        children_of(leader_of(session))[-1].kill()
        while time.monotonic() < killed[0] + 30:  # as one large product after the other
            time.sleep(0.05)
        return finish(decoder, *args)

    monkeypatch.setattr(Decoder, "finish_layer", finish_slowly)
    ended = pytest.raises(RankError, match=r"rank 1 of 2 ended \(signal 9\)")
    with start(engine=EXACT, parallel={"tensor": 2}) as session, ended:
        session.ask(QUESTION, say_nothing)
    assert time.monotonic() - killed[0] < 10


def test_what_a_process_complains_of_is_said(
    start: Callable[..., Session], model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tsdoc.parallel import job

    monkeypatch.setattr(
        job.Job, "to_json", lambda self: json.dumps({"directory": "/nowhere", "size": 1})
    )
    with start(parallel={"tensor": 2}) as session, pytest.raises(RankError, match="TypeError"):
        session.ask(QUESTION, say_nothing)


@pytest.mark.parametrize(("cores", "size", "warned"), [(1, 1, 0), (2, 2, 0), (2, 4, 1), (1, 2, 1)])
def test_more_processes_than_cores_are_warned_of(
    start: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    size: int,
    warned: int,
) -> None:
    monkeypatch.setattr(loading, "num_cpus", lambda: cores)
    reporter = Recorder()
    with start(reporter, parallel={"tensor": 2 if size > 1 else 1, "sequence": max(1, size // 2)}):
        said = [warning for warning in reporter.warnings if warning[0] == "few_cores"]
    assert len(said) == warned
    assert all(f"{size} processes share {cores} core" in message for _, _, message in said)


def test_a_gpu_has_no_need_of_cores() -> None:
    reporter = Recorder()
    loading.warn_of_few_cores(ParallelSettings(tensor=64, sequence=64), "cuda", reporter)
    assert reporter.warnings == []


def test_what_is_not_supported_is_refused(start: Callable[..., Session], home: Home) -> None:
    with pytest.raises(UsageError, match="6 query heads cannot be split over 7"):
        start(parallel={"tensor": 7})
    with pytest.raises(UsageError, match="tsdoc eval runs in one process"):
        evaluate(
            EvalRequest(),
            settings=Settings.model_validate({"parallel": {"tensor": 2}}),
            home=home,
            ingest=IngestOptions(),
            reporter=Silent(),
            offline=True,
        )
