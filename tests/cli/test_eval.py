"""`tsdoc eval`: options, table, JSON and page; the evaluation itself is tested in tests/eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, FakeServices
from tests.eval.test_results import make_item
from tsdoc.eval.fidelity import Fidelity
from tsdoc.eval.request import Difference, EvalReport, EvalRequest
from tsdoc.eval.results import make_cells
from tsdoc.eval.tasks import TASKS


class Evaluating(FakeServices):
    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.requests: list[EvalRequest] = []
        self.fidelity: tuple[Fidelity, ...] = ()
        self.stopped_after: tuple[int, int] | None = None

    def evaluate(self, request: EvalRequest, **arguments: Any) -> EvalReport:
        self.requests.append(request)
        if self.stopped_after is not None:
            arguments["on_kept"](*self.stopped_after)
            raise KeyboardInterrupt
        items = [
            make_item(i, float(i % 3 > 0), task=task, policy=policy, haystack=f"{task}{length}",
                      length=length)
            for policy in ("tokenselect", "streaming_llm")
            for length in (8192, 131_072)
            for task in ("niah_single_2", "niah_multikey_1")
            for i in range(10)
        ]  # fmt: skip
        return EvalReport(
            model="model <b>", licence=None, device="cpu", window=32_768, document="book.txt",
            document_tokens=200_000, cells=tuple(make_cells(items)), items=tuple(items),
            differences=(
                Difference(policy="streaming_llm", other="tokenselect", mean=-0.1, low=-0.3,
                           high=0.1, n=40),
            ),
            fidelity=self.fidelity, path=None,
        )  # fmt: skip


@pytest.fixture
def services(services: FakeServices) -> Evaluating:
    return Evaluating(services.root)


def test_options_reach_the_request(cli: Cli, services: Evaluating) -> None:
    line = (
        "eval --tasks vt,cwe --lengths 8k,1M,3000,all --policy tokenselect:top_k=4096,theta=null "
        "--policy topk --source a.txt --items 7 --haystacks 2 --seed 5 --haystack document,noise "
        "--out r.jsonl"
    )
    assert cli(*line.split()).code == 0
    (request,) = services.requests
    assert request == EvalRequest(
        tasks=("vt", "cwe"),
        lengths=(8192, 1_048_576, 3000, 0),
        policies=("tokenselect:top_k=4096,theta=null", "topk"),
        items=7,
        haystacks=2,
        seed=5,
        backgrounds=("document", "noise"),
        sources=("a.txt",),
        out=Path("r.jsonl"),
    )


@pytest.mark.parametrize("lengths", ["8x", "0", "-3", "8k;9k"])
def test_a_wrong_length_is_a_usage_error(cli: Cli, lengths: str) -> None:
    result = cli("eval", "--lengths", lengths)
    assert result.code == 2
    assert "is no length" in result.stderr


@pytest.mark.parametrize("option", ["--tasks", "--lengths", "--haystack"])
@pytest.mark.parametrize("value", ["", " , "])
def test_an_option_that_names_nothing_is_a_usage_error(cli: Cli, option: str, value: str) -> None:
    result = cli("eval", option, value)
    assert result.code == 2
    assert option in result.stderr
    assert "names nothing" in result.stderr


def test_an_unknown_haystack_is_a_usage_error(cli: Cli) -> None:
    result = cli("eval", "--haystack", "noise,hay")
    assert result.code == 2
    assert "names no kind" in result.stderr


def test_the_table_fits_80_columns(
    cli: Cli, services: Evaluating, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli("eval", terminal=True).stdout.splitlines()
    assert max(map(len, lines[:9])) <= 80
    cells = "niah_single_2 8k tokenselect 60 31–83 10 2.0 s 0.5 s 200 ms"
    assert lines[1].split() == cells.split()
    assert "At 8,192 tokens of book.txt with tokenselect: 60 % right" in "\n".join(lines)
    assert "streaming_llm against tokenselect: -10.0 points" in "\n".join(lines)
    assert "All of book.txt is 200,000 tokens long" in "\n".join(lines)


@pytest.mark.parametrize(
    ("kept", "words"), [(0, "no answers are kept"), (1200, "1,200 of 2,000 answers are kept")]
)
def test_ctrl_c_says_which_answers_are_kept(
    cli: Cli, services: Evaluating, kept: int, words: str
) -> None:
    services.stopped_after = (kept, 2000)
    result = cli("eval")
    assert result.code == 130
    assert f"stopped; {words}, run the same command to go on" in result.stderr


def test_fidelity_is_a_table_of_its_own(
    cli: Cli, services: Evaluating, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    services.fidelity = (
        Fidelity(
            policy="tokenselect:top_k=4096,chunk_size=256", length=8192, n=128, kl=0.01234,
            kl_high=0.5, same=0.9375, low=0.88, high=0.97, perplexity=12.3456,
            full_perplexity=12.0, recall=0.987, recall_by_layer=(0.9, 1.0), hit_ratio=0.3,
        ),
    )  # fmt: skip
    page = tmp_path / "page.html"
    lines = cli("eval", "--fidelity", "--html", str(page), terminal=True).stdout.splitlines()
    assert "0.0123" in page.read_text("utf-8")
    assert services.requests[0].fidelity
    assert max(map(len, lines)) <= 80
    cells = " ".join(lines[1].split())
    assert cells.endswith("8k 128 0.0123 0.500 94 % 88–97 12.35 12.00 98.7 %")


def test_json_has_a_schema_cells_and_items(cli: Cli, services: Evaluating) -> None:
    value = cli("eval", "--json").json()
    assert value["schema"] == "tsdoc.eval/1"
    assert len(value["cells"]) == 8
    assert value["cells"][0].keys() >= {"policy", "task", "length", "n", "score", "low", "high"}
    assert len(value["items"]) == 80


def test_the_page_has_a_heat_map_for_each_task_and_policy(
    cli: Cli, services: Evaluating, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    result = cli("eval", "--html", str(page))
    assert result.code == 0
    assert f"page written: {page}" in result.stderr
    text = page.read_text("utf-8")
    assert text.count('class="heat"') == 4
    assert "model &lt;b&gt;" in text
    assert "model <b>" not in text
    assert "50 % right at 0–20 % of 8,192 tokens" in text


def test_a_page_that_cannot_be_written_stops_before_any_work(
    cli: Cli, services: Evaluating, tmp_path: Path
) -> None:
    assert cli("eval", "--html", str(tmp_path / "missing" / "page.html")).code == 2
    assert services.requests == []


def test_tasks_and_policies_are_listed(cli: Cli) -> None:
    result = cli("eval", "--list")
    assert all(name in result.stdout for name in TASKS)
    names = [policy["name"] for policy in cli("eval", "--list", "--json").json()["policies"]]
    assert "tokenselect" in names


@pytest.mark.parametrize("option", ["--tasks", "--data", "--items", "--out"])
def test_fidelity_passes_over_no_option_of_tasks(
    cli: Cli, services: Evaluating, option: str
) -> None:
    result = cli("eval", "--fidelity", option, "5")
    assert result.code == 2
    assert f"{option} goes with tasks, and --fidelity has none" in result.stderr
    assert not services.requests
