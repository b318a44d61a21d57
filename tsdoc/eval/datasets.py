"""Loaders for the JSONL files of InfiniteBench, RULER and LongBench, for users who have them.

Which of the three a file belongs to shows in the fields of its lines; the task, and with it the
metric, in `dataset` (LongBench), the file's name (InfiniteBench) or its folder's (RULER).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsdoc.errors import InputError, reason_of
from tsdoc.eval.haystack import Question
from tsdoc.eval.metrics import Metric

MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One item of a file: its context is a haystack of its own."""

    benchmark: str
    task: str
    context: str
    question: Question


_INFINITE: Mapping[str, tuple[Metric, int]] = {
    "passkey": ("first_number", 8), "number_string": ("first_number", 16),
    "kv_retrieval": ("word", 64), "math_find": ("first_number", 8), "code_run": ("first_number", 8),
    "code_debug": ("choice", 8), "longbook_choice_eng": ("choice", 40),
    "longbook_qa_eng": ("f1", 40), "longdialogue_qa_eng": ("any", 40),
    "longbook_sum_eng": ("rouge_l", 1200),
}  # fmt: skip
_LONGBENCH: Mapping[str, tuple[Metric, int]] = {
    "narrativeqa": ("f1", 128), "qasper": ("f1", 128), "multifieldqa_en": ("f1", 64),
    "hotpotqa": ("f1", 32), "2wikimqa": ("f1", 32), "musique": ("f1", 32),
    "gov_report": ("rouge_l", 512), "qmsum": ("rouge_l", 512), "multi_news": ("rouge_l", 512),
    "trec": ("class", 64), "triviaqa": ("f1", 32), "samsum": ("rouge_l", 128),
    "passage_count": ("count", 32), "passage_retrieval_en": ("retrieval", 32),
    "lcc": ("edit", 64), "repobench-p": ("edit", 64),
}  # fmt: skip
_RULER_ROOM: Mapping[str, int] = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
_FIRST_LINE_ONLY = frozenset({"trec", "triviaqa", "samsum"})


def load_examples(path: Path, *, limit: int | None) -> list[Example]:
    """Reads a file.

    Args:
        path: A JSONL file of one of the three benchmarks.
        limit: Reads so many items at most.

    Raises:
        InputError: the file cannot be read, or is of none of them.
    """
    examples: list[Example] = []
    try:
        with path.open("rb") as lines:
            number = 0
            while (limit is None or len(examples) < limit) and (
                line := lines.readline(MAX_LINE_BYTES)
            ):
                number += 1
                if line.strip():
                    examples.append(_parse(line, path, number))
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", where=str(path)) from error
    if not examples:
        raise InputError("holds no items", where=str(path))
    return examples


def _parse(line: bytes, path: Path, number: int) -> Example:
    where = f"{path}:{number}"
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise TypeError("a line is not an object")
        if "dataset" in fields and "all_classes" in fields:
            return _longbench(fields, where)
        if "outputs" in fields and "input" in fields:
            return _ruler(fields, path)
        if "context" in fields and "answer" in fields:
            return _infinite(fields, path, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"is not an item of InfiniteBench, RULER or LongBench ({reason_of(error)})", where=where
        ) from error
    raise InputError("is not an item of InfiniteBench, RULER or LongBench", where=where)


def _longbench(fields: Mapping[str, Any], where: str) -> Example:
    task = str(fields["dataset"]).removesuffix("_e")
    if task not in _LONGBENCH:
        raise InputError(
            f"LongBench's {task} is scored with Chinese word segmentation, which is not here",
            where=where,
        )
    metric, room = _LONGBENCH[task]
    return Example(
        benchmark="LongBench",
        task=task,
        context=str(fields["context"]),
        question=Question(
            text=str(fields["input"]) or _LONGBENCH_QUESTIONS.get(task, "Summarise the text."),
            answers=tuple(map(str, fields["answers"])),
            metric=metric,
            depth=None,
            max_new_tokens=room,
            classes=tuple(map(str, fields["all_classes"] or ())),
            first_line=task in _FIRST_LINE_ONLY,
        ),
    )


_LONGBENCH_QUESTIONS: Mapping[str, str] = {
    "passage_count": "How many different passages are there, leaving out those that repeat "
    "another? Answer with the number alone.",
    "lcc": "What is the next line of this code? Answer with it alone.",
    "repobench-p": "What is the next line of this code? Answer with it alone.",
}


def _ruler(fields: Mapping[str, Any], path: Path) -> Example:
    task = path.parent.name if path.stem in ("validation", "test", "train") else path.stem
    text = str(fields["input"]).rstrip()
    # RULER's question is what stands behind the last line break of its one text.
    context, _, question = text.rpartition("\n")
    prefix = str(fields.get("answer_prefix") or "")
    family = task.split("_")[0]
    return Example(
        benchmark="RULER",
        task=task,
        context=context,
        question=Question(
            text=f"{question} {prefix.strip()}".strip(),
            answers=tuple(map(str, fields["outputs"])),
            metric="any" if family == "qa" else "all",
            depth=None,
            max_new_tokens=_RULER_ROOM.get(family, 128),
        ),
    )


def _infinite(fields: Mapping[str, Any], path: Path, where: str) -> Example:
    task = path.stem
    if task not in _INFINITE:
        known = ", ".join(_INFINITE)
        raise InputError(
            "this file's name is no task of InfiniteBench", where=where, hint=f"Tasks: {known}."
        )
    metric, room = _INFINITE[task]
    question = str(fields["input"])
    given = fields["answer"]
    answers = tuple(map(str, given if isinstance(given, list) else [given]))
    options = [str(option) for option in fields.get("options") or ()]
    if options:
        lines = [f"{letter}. {text}" for letter, text in zip("ABCD", options, strict=False)]
        question = "\n".join([question, *lines, "Answer with the letter alone."])
        letters = [letter for letter, text in zip("ABCD", options, strict=False) if text in answers]
        answers = (*letters, *answers)
    return Example(
        benchmark="InfiniteBench",
        task=task,
        context=str(fields["context"]),
        question=Question(
            text=question, answers=answers, metric=metric, depth=None, max_new_tokens=room
        ),
    )
