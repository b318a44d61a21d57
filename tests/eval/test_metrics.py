from __future__ import annotations

import pytest

from tsdoc.eval.metrics import Metric, score


@pytest.mark.parametrize(
    ("metric", "prediction", "answers", "expected"),
    [
        ("all", "They are 12 and 34.", ["12", "34", "56"], 2 / 3),
        ("all", "ABC", ["abc"], 1.0),
        ("any", "It is Paris.", ["London", "paris"], 1.0),
        ("any", "It is Rome.", ["London", "paris"], 0.0),
        ("first_number", "The key is 71432.", ["71432"], 1.0),
        ("first_number", "1 or 71432", ["71432"], 0.0),
        ("first_number", "71,432", ["71432"], 1.0),
        ("first_number", "none", ["71432"], 0.0),
        ("word", 'The value is "ab-12".', ["ab-12"], 1.0),
        ("word", "ab-123", ["ab-12"], 0.0),
        ("choice", "B. Because he said so", ["B", "the ship"], 1.0),
        ("choice", "It was the ship", ["B", "the ship"], 1.0),
        ("choice", "C", ["B", "the ship"], 0.0),
        ("f1", "the red house", ["A red, big house!"], 0.8),
        ("f1", "nothing", ["house"], 0.0),
        ("rouge_l", "a b c d", ["a c d e"], 0.75),
        ("count", "There are 7, not 8", ["7"], 0.5),
        ("retrieval", "Paragraph 12", ["Paragraph 12"], 1.0),
        ("edit", "return x", ["return x"], 1.0),
        ("edit", "# comment\nabcd", ["abxd"], 0.75),
    ],
)
def test_published_metrics(
    metric: Metric, prediction: str, answers: list[str], expected: float
) -> None:
    assert score(metric, prediction, answers) == pytest.approx(expected)


def test_a_class_counts_less_when_others_are_named_too() -> None:
    classes = ["Date", "City", "Other city"]
    assert score("class", "Date", ["Date"], classes) == 1.0
    assert score("class", "Date or City", ["Date"], classes) == 0.5
    assert score("class", "Other city", ["Date"], classes) == 0.0
