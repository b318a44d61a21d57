"""The whole way on a small random model: what it says is measured, kept and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.session.conftest import Recorder
from tsdoc.errors import ResourceError, UsageError
from tsdoc.eval.plan import Plan
from tsdoc.eval.request import WHOLE, EvalReport
from tsdoc.eval.run import ANSWER_TOKENS
from tsdoc.eval.tasks import find_task
from tsdoc.home import Home
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.prompt.tokenizer import TextTokenizer

Run = Callable[..., EvalReport]


def test_every_cell_has_items_times_and_an_interval(run_eval: Run, home: Home) -> None:
    report = run_eval(tasks=("niah_single_2", "cwe"), lengths=(3000, 3500))
    assert [(c.task, c.length, c.n) for c in report.cells] == [
        ("niah_single_2", 3000, 2), ("cwe", 3000, 1),
        ("niah_single_2", 3500, 2), ("cwe", 3500, 1),
    ]  # fmt: skip
    for cell in report.cells:
        assert 0 <= cell.low <= cell.score <= cell.high <= 1
        assert cell.prefill_s > 0
    assert all(item.prompt_tokens <= item.length for item in report.items)


def test_nothing_is_left_in_the_store_and_results_are_private(run_eval: Run, home: Home) -> None:
    report = run_eval(tasks=("niah_single_2",), lengths=(2000,))
    assert not home.store.exists()
    kept = [path for path in home.root.rglob("*") if path.is_file()]
    assert not any(b"the miller" in path.read_bytes() for path in kept)
    assert report.path is not None
    assert report.path.parent == home.evals
    assert home.evals.stat().st_mode & 0o077 == 0


def test_a_second_run_answers_nothing_anew(run_eval: Run) -> None:
    first = run_eval(tasks=("niah_single_2",), lengths=(2000,))
    recorder = Recorder()
    second = run_eval(recorder, tasks=("niah_single_2",), lengths=(2000,))
    assert second.items == first.items
    assert "eval" not in recorder.stages
    more = run_eval(tasks=("niah_single_2",), lengths=(2000, 2500))
    assert more.items[: len(first.items)] == first.items


@pytest.mark.parametrize(
    ("at", "kept_before"), [(1, 2), (2501, 3)], ids=["prefill", "first answer"]
)
def test_an_interrupted_run_goes_on(
    run_eval: Run, tmp_path: Path, at: int, kept_before: int
) -> None:
    """Each answer is kept as it comes, also of a haystack whose other questions are open."""
    whole = run_eval(tasks=("niah_single_2",), lengths=(2000, 2500), out=tmp_path / "whole.jsonl")
    out = tmp_path / "results.jsonl"
    request = {"tasks": ("niah_single_2",), "lengths": (2000, 2500), "out": out}

    class Impatient(Recorder):
        def advance(self, done: int) -> None:
            self.done = done

        def working(self, units: int) -> None:
            if self.done and units >= at:
                raise KeyboardInterrupt

    kept: list[tuple[int, int]] = []
    impatient = Impatient()
    with pytest.raises(KeyboardInterrupt):
        run_eval(impatient, on_kept=lambda *numbers: kept.append(numbers), **request)
    assert len(out.read_text("utf-8").split('"item"')) == kept_before + 1
    assert impatient.done == 2000 + 2 * ANSWER_TOKENS
    again = Recorder()
    report = run_eval(again, on_kept=lambda *numbers: kept.append(numbers), **request)
    left = 4 - kept_before
    assert f"250 for each of {left} question" in again.notes[0]
    assert [cell.n for cell in report.cells] == [2, 2]
    assert [i.prediction for i in report.items] == [i.prediction for i in whole.items]
    assert len(out.read_text("utf-8").split('"item"')) == 5
    assert kept == [
        *((n, 4) for n in range(kept_before + 1)),
        *((n, 4) for n in range(kept_before, 5)),
    ]


def test_what_is_said_to_be_done_is_what_the_progress_counts(run_eval: Run) -> None:
    class Counting(Recorder):
        def start(self, stage: str, total: int | None, unit: str) -> None:
            self.total = total

        def advance(self, done: int) -> None:
            self.done = done

    counting = Counting()
    run_eval(counting, tasks=("niah_single_2",), lengths=(2000, 2500))
    total = 2000 + 2500 + 4 * ANSWER_TOKENS
    assert counting.notes[0] == (
        f"{total:,} tokens of work: 4,500 to prefill in 2 haystacks, 250 for each of 4 questions; "
        "nothing goes to the store"
    )
    assert counting.done == counting.total == total


def test_policies_answer_the_same_items_and_are_compared(run_eval: Run) -> None:
    report = run_eval(
        tasks=("niah_multikey_1",),
        lengths=(2500,),
        items=4,
        policies=("tokenselect", "tokenselect:top_k=32,chunk_size=64,theta=null", "head_vote"),
    )
    assert [cell.policy for cell in report.cells] == [
        "tokenselect", "tokenselect:top_k=32,chunk_size=64,theta=null", "head_vote",
    ]  # fmt: skip
    haystacks = {item.haystack for item in report.items}
    assert len(haystacks) == 1
    assert [(d.other, d.n) for d in report.differences] == [("tokenselect", 4)] * 2
    without_cache = [item for item in report.items if "theta=null" in item.policy]
    assert not any(item.hits for item in without_cache)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("fancy", "no policy fancy"),
        ("tokenselect:top=3", "no setting top"),
        ("tokenselect:top_k", "no key=value"),
        ("tokenselect:top_k=0", "greater than 0"),
        ("tokenselect:chunk_size=100", "not a multiple"),
        ("head_vote:function=topk", "no setting function"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_before_any_work(
    run_eval: Run, policy: str, message: str
) -> None:
    recorder = Recorder()
    with pytest.raises(UsageError, match=message):
        run_eval(recorder, policies=(policy,))
    assert recorder.stages == []


@pytest.mark.parametrize("more", [{}, {"fidelity": True}])
def test_a_length_that_memory_cannot_hold_is_refused_before_its_text_is_made(
    run_eval: Run, more: dict[str, bool]
) -> None:
    recorder = Recorder()
    with pytest.raises(ResourceError, match="GB of memory"):
        run_eval(recorder, lengths=(10**12,), **more)
    assert recorder.stages == []


def test_facts_are_hidden_in_the_users_document(run_eval: Run, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(f"A line of prose, the {i}th." for i in range(400)), "utf-8")
    report = run_eval(tasks=("niah_single_2",), lengths=(1500, 0), sources=(str(book),))
    assert report.document == "book.txt"
    assert [cell.length for cell in report.cells] == [1500, report.document_tokens]
    assert all("/document/" in item.haystack for item in report.items)


def test_a_short_document_is_used_whole(run_eval: Run, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join(f"A line of prose, the {i}th." for i in range(120)), "utf-8")
    recorder = Recorder()
    report = run_eval(recorder, sources=(str(book),))
    assert {cell.length for cell in report.cells} == {report.document_tokens}
    assert any("all of it is used" in note for note in recorder.notes)


def test_a_benchmarks_file_is_its_own_task(run_eval: Run, tmp_path: Path) -> None:
    path = tmp_path / "passkey.jsonl"
    lines = [
        {"id": i, "context": f"The key is {i}. " * 30, "input": "Which key?", "answer": f"{i}"}
        for i in range(4)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    report = run_eval(files=(path,), items=3)
    assert [(c.task, c.length, c.n) for c in report.cells] == [("InfiniteBench/passkey", 0, 3)]


def test_full_attention_says_what_transformers_says_on_the_same_items(
    run_eval: Run, model_directory: Path, tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    tasks = ("passkey", "math_find", "niah_multikey_1")
    request = {"tasks": tasks, "lengths": (900,), "items": 1}
    report = run_eval(policies=("full", "tokenselect:top_k=4096"), kv_dtype="float32", **request)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory).eval()
    plan = Plan(
        tasks=tuple(map(find_task, tasks)), lengths=(900,), items=1, haystacks=1, seed=0,
        backgrounds=(), document=(),
    )  # fmt: skip
    said = {}
    for job in plan.jobs():
        haystack = job.build(tokenizer, template)
        prompt = torch.from_numpy(np.concatenate((haystack.ids, haystack.question_ids[0])))[None]
        with torch.no_grad():
            out = model.generate(
                prompt.long(),
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=haystack.questions[0].max_new_tokens,
                pad_token_id=0,
            )
        tokens = out[0, prompt.shape[1] :].tolist()
        said[job.task_name] = tokenizer.decode([t for t in tokens if t != 1])
    assert len(report.items) == 6
    assert all(item.prediction == said[item.task] for item in report.items)


def test_a_policy_outside_its_window_is_left_out_with_a_warning(run_eval: Run) -> None:
    recorder = Recorder()
    report = run_eval(
        recorder, tasks=("passkey",), lengths=(800, 5000), policies=("full", "streaming_llm")
    )
    assert [(c.policy, c.length) for c in report.cells] == [
        ("full", 800), ("streaming_llm", 800), ("streaming_llm", 5000),
    ]  # fmt: skip
    assert [code for code, _, _ in recorder.warnings] == ["outside_window"]


def test_a_length_of_the_whole_document_needs_one(run_eval: Run) -> None:
    with pytest.raises(UsageError, match="--source"):
        run_eval(lengths=(0,))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"out": Path("/nowhere/at/all.jsonl")}, "its directory does not exist"),
        ({"out": Path("-")}, "results go into a file"),
        ({"lengths": (2000, WHOLE)}, "the whole document needs --source"),
        ({"backgrounds": ("document",)}, "a haystack of a document needs --source"),
    ],
)
def test_what_no_model_could_do_is_refused_before_one_is_fetched(
    run_eval: Run, monkeypatch: pytest.MonkeyPatch, request_: dict[str, object], message: str
) -> None:
    monkeypatch.setattr("tsdoc.eval.evaluate.open_model", None)
    with pytest.raises(UsageError, match=message):
        run_eval(**request_)
