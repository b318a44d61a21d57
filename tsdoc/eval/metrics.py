"""How answers are scored: the published metrics of RULER, InfiniteBench and LongBench.

Every metric takes the prediction and the expected answers and returns a score from 0 to 1.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

Metric = Literal[
    "all", "any", "first_number", "word", "choice", "f1", "rouge_l", "class", "count",
    "retrieval", "edit",
]  # fmt: skip
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CHOICE = re.compile(r"\b([A-D])\b")
_TABLE = str.maketrans("", "", string.punctuation)


def score(
    metric: Metric, prediction: str, answers: Sequence[str], classes: Sequence[str] = ()
) -> float:
    """Scores a prediction.

    Args:
        metric: `all`: share of the answers in it. `any`: whether one is. `first_number`: whether
            its first number is the answer. `word`: whether the answer is one of its words.
            `choice`: whether its first letter A to D, or its text, is the answer. `f1`: overlap of
            words. `rouge_l`: longest common subsequence. `class`: share of the class among those
            named. `count`, `retrieval`: share of its numbers that are right. `edit`: 1 minus the
            edit distance of the first line of code.
        prediction: What the model said.
        answers: What was expected; for all but `all` the best one counts.
        classes: All classes, for `class`.
    """
    if metric == "all":
        text = prediction.casefold()
        return sum(answer.casefold() in text for answer in answers) / max(1, len(answers))
    if metric == "class":
        return max(_class(prediction, answer, classes) for answer in answers)
    measure = _MEASURES[metric]
    return max((measure(prediction, answer) for answer in answers), default=0.0)


def _contains(prediction: str, answer: str) -> float:
    return float(answer.casefold() in prediction.casefold())


def _first_number(prediction: str, answer: str) -> float:
    found = _NUMBER.search(prediction.replace(",", ""))
    return float(found is not None and float(found.group()) == float(answer))


def _word(prediction: str, answer: str) -> float:
    words = re.split(r"[\s\"'{}:,.!?]+", prediction)
    return float(answer in words)


def _choice(prediction: str, answer: str) -> float:
    found = _CHOICE.search(prediction)
    if found is not None and len(answer) == 1:
        return float(found.group(1) == answer)
    return float(len(answer) > 1 and answer.casefold() in prediction.casefold())


def _tokens(text: str) -> list[str]:
    """Lower-case words without punctuation and articles."""
    return _ARTICLES.sub(" ", text.casefold().translate(_TABLE)).split()


def _f1(prediction: str, answer: str) -> float:
    ours, theirs = _tokens(prediction), _tokens(answer)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def _rouge_l(prediction: str, answer: str) -> float:
    ours, theirs = prediction.casefold().split(), answer.casefold().split()
    common = _common_subsequence(ours, theirs)
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def _class(prediction: str, answer: str, classes: Sequence[str]) -> float:
    named = [name for name in classes if name in prediction]
    # A name that is part of the right one is not another choice.
    named = [name for name in named if name == answer or name not in answer]
    return 1 / len(named) if answer in named else 0.0


def _numbers(prediction: str, answer: str) -> float:
    wanted = _NUMBER.search(answer)
    found = _NUMBER.findall(prediction)
    return found.count(wanted.group()) / len(found) if wanted is not None and found else 0.0


def _edit(prediction: str, answer: str) -> float:
    lines = prediction.lstrip("\n").split("\n")
    code = [line for line in lines if not any(mark in line for mark in ("`", "#", "//"))]
    line = code[0] if code else ""
    # fuzz.ratio: twice the matched characters over all of them.
    matched = _common_subsequence(line, answer)
    return 2 * matched / max(1, len(line) + len(answer))


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for number, y in enumerate(b, start=1):
            above = row[number]
            row[number] = diagonal + 1 if x == y else max(above, row[number - 1])
            diagonal = above
    return row[-1]


_MEASURES: dict[str, Callable[[str, str], float]] = {
    "any": _contains,
    "first_number": _first_number,
    "word": _word,
    "choice": _choice,
    "f1": _f1,
    "rouge_l": _rouge_l,
    "count": _numbers,
    "retrieval": _numbers,
    "edit": _edit,
}
