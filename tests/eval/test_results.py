from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tsdoc.errors import ResourceError, UsageError
from tsdoc.eval.results import (
    ItemResult,
    ResultFile,
    make_cells,
    mean_caught,
    paired_difference,
    wilson,
)

HEADER = {"model": "m", "selection": {"top_k": 2048}}


def make_item(item: int = 0, score: float = 1.0, **changes: object) -> ItemResult:
    made = ItemResult(
        policy="tokenselect", task="vt", length=4096, haystack="h", item=item, depth=item / 10,
        score=score, prediction="7", answers=("7",), prompt_tokens=4000, generated_tokens=3,
        prefill_s=2.0, first_s=0.5, decode_s=0.4, lookups=10, hits=4,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mean", "n", "low", "high"),
    [(0.5, 10, 0.2366, 0.7634), (1.0, 20, 0.8389, 1.0), (0.0, 5, 0.0, 0.4345)],
)
def test_wilson_intervals_of_the_textbook(mean: float, n: int, low: float, high: float) -> None:
    assert wilson(mean, n) == pytest.approx((low, high), abs=1e-4)


def test_what_was_kept_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    items = [make_item(i) for i in (0, 1, 4)]
    results = ResultFile(path, HEADER)
    for item in items:
        results.add(item)
    again = ResultFile(path, HEADER)
    assert again.items == items
    assert again.answered("tokenselect", "h") == {0, 1, 4}
    assert again.answered("full", "h") == set()
    assert path.stat().st_mode & 0o077 == 0


def test_a_line_that_was_not_finished_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results = ResultFile(path, HEADER)
    results.add(make_item(0))
    results.add(make_item(1))
    path.write_bytes(path.read_bytes()[:-20])
    again = ResultFile(path, HEADER)
    assert again.items == [make_item(0)]
    again.add(make_item(1, 0.0))
    assert ResultFile(path, HEADER).items == [make_item(0), make_item(1, 0.0)]


def test_results_of_another_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ResultFile(path, HEADER)
    with pytest.raises(UsageError, match="another model"):
        ResultFile(path, {**HEADER, "model": "n"})
    path.write_text("not json", encoding="utf-8")
    with pytest.raises(UsageError, match="no file of results"):
        ResultFile(path, HEADER)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot be kept"):
        ResultFile(tmp_path / "missing" / "results.jsonl", HEADER)


def test_cells_have_n_interval_depths_and_times() -> None:
    items = [make_item(i, float(i < 6)) for i in range(10)]
    (cell,) = make_cells([*items])
    assert (cell.n, cell.score) == (10, 0.6)
    assert (cell.low, cell.high) == wilson(0.6, 10)
    assert cell.depths == ((1.0, 2), (1.0, 2), (1.0, 2), (0.0, 2), (0.0, 2))
    assert (cell.prefill_s, cell.first_s) == (2.0, 0.5)
    assert cell.token_s == pytest.approx(0.2)
    assert cell.hit_ratio == pytest.approx(0.4)
    assert cell.caught is None


def test_what_the_index_caught_is_the_mean_of_all_sampled_selections() -> None:
    often = dataclasses.replace(make_item(0, 1.0), sampled=9, caught=0.9)
    once = dataclasses.replace(make_item(1, 1.0), sampled=1, caught=0.5)
    (cell,) = make_cells([often, once, make_item(2, 1.0)])
    assert cell.sampled == 10
    assert cell.caught == pytest.approx(0.86)
    rare = dataclasses.replace(cell, sampled=1, caught=1.0)
    assert mean_caught([cell, rare]) == pytest.approx(9.6 / 11)
    assert mean_caught([make_item(3, 1.0)]) is None


def test_items_of_an_older_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    kept = {**dataclasses.asdict(make_item(0, 1.0)), "caught": 0.9}
    del kept["sampled"]
    ResultFile(path, HEADER)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(kept) + "\n" + json.dumps({**kept, "item": 1, "odd": 1}) + "\n")
    (item,) = ResultFile(path, HEADER).items
    assert (item.sampled, item.caught) == (0, 0.9)


def test_a_difference_is_taken_over_the_items_both_answered() -> None:
    ours = [make_item(i, 1.0) for i in range(4)]
    theirs = [make_item(i, float(i % 2), policy="full") for i in range(6)]
    paired = paired_difference(ours, theirs)
    assert paired is not None
    mean, low, high, n = paired
    assert (mean, n) == (0.5, 4)
    assert low == pytest.approx(0.5 - 1.96 * 0.57735 / 2, abs=1e-3)
    assert high == 1.0  # no difference is greater: 1.0658 without that
    assert paired_difference(ours[:1], theirs) is None
