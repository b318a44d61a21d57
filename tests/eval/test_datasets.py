"""Lines of the three benchmarks' files, as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tsdoc.errors import InputError
from tsdoc.eval.datasets import load_examples


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_infinitebench(tmp_path: Path) -> None:
    line = {"id": 0, "context": "grass. key 71432.", "input": "What is it?", "answer": ["71432"]}
    (example,) = load_examples(write(tmp_path / "passkey.jsonl", line), limit=None)
    assert (example.benchmark, example.task) == ("InfiniteBench", "passkey")
    assert example.question.metric == "first_number"
    assert (example.context, example.question.answers) == ("grass. key 71432.", ("71432",))


def test_infinitebench_choices_are_listed_and_their_letter_counts(tmp_path: Path) -> None:
    line = {
        "id": 1, "context": "text", "input": "Who?", "answer": ["Ann"],
        "options": ["Bob", "Ann", "Cy", "Di"],
    }  # fmt: skip
    (example,) = load_examples(write(tmp_path / "longbook_choice_eng.jsonl", line), limit=None)
    assert "B. Ann" in example.question.text
    assert example.question.answers == ("B", "Ann")


def test_ruler_question_is_what_stands_behind_the_last_line_break(tmp_path: Path) -> None:
    line = {"index": 0, "input": "Some text.\nmore\nWhat is X? The X is", "outputs": ["7", "8"]}
    path = write(tmp_path / "niah_multivalue" / "validation.jsonl", line)
    (example,) = load_examples(path, limit=None)
    assert (example.benchmark, example.task) == ("RULER", "niah_multivalue")
    assert example.context == "Some text.\nmore"
    assert example.question.text == "What is X? The X is"
    assert (example.question.metric, example.question.max_new_tokens) == ("all", 128)


def test_ruler_answers_of_qa_are_alternatives(tmp_path: Path) -> None:
    line = {"index": 0, "input": "Text.\nWho?", "outputs": ["A", "B"], "answer_prefix": " Answer:"}
    (example,) = load_examples(write(tmp_path / "qa_1.jsonl", line), limit=None)
    assert example.question.metric == "any"
    assert example.question.text == "Who? Answer:"


def test_longbench(tmp_path: Path) -> None:
    line: dict[str, object] = {
        "input": "What kind?", "context": "examples", "answers": ["Date"], "length": 3,
        "dataset": "trec", "language": "en", "all_classes": ["Date", "City"], "_id": "x",
    }  # fmt: skip
    (example,) = load_examples(write(tmp_path / "trec.jsonl", line), limit=None)
    assert (example.question.metric, example.question.first_line) == ("class", True)
    assert example.question.classes == ("Date", "City")


def test_longbench_in_chinese_is_refused(tmp_path: Path) -> None:
    line: dict[str, object] = {
        "input": "", "context": "", "answers": [], "dataset": "dureader", "all_classes": None,
    }  # fmt: skip
    with pytest.raises(InputError, match="Chinese"):
        load_examples(write(tmp_path / "dureader.jsonl", line), limit=None)


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    line = {"context": "c", "input": "q", "answer": "1"}
    path = write(tmp_path / "passkey.jsonl", line, line, {"broken": True})
    assert len(load_examples(path, limit=2)) == 2


@pytest.mark.parametrize("text", ["", "[]\n", "no json\n", '{"a": 1}\n'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError):
        load_examples(path, limit=None)
