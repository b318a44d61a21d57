"""All tasks by their names."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from tsdoc.errors import UsageError
from tsdoc.eval.background import Kind
from tsdoc.eval.tasks import infinite, needles, tracing
from tsdoc.eval.tasks.request import Make


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task.

    Attributes:
        name: As RULER or InfiniteBench call it.
        about: One line for people.
        make: Makes a haystack.
        background: What its haystack is by default; None where the haystack is the task itself.
        max_questions: Questions that can share one haystack.
    """

    name: str
    about: str
    make: Make
    background: Kind | None
    max_questions: int


MANY = 24

_ROWS: tuple[tuple[str, str, Make, Kind | None, int], ...] = (
    ("niah_single_1", "one fact in repeated filler", needles.make_single, "filler", MANY),
    ("niah_single_2", "one fact in prose", needles.make_single, "noise", MANY),
    ("niah_single_3", "one fact in prose, a UUID", needles.make_single_uuid, "noise", MANY),
    ("niah_multikey_1", "one fact among 4 of its kind", needles.make_multikey, "noise", 4 * MANY),
    (
        "niah_multikey_2",
        "one fact in a text of nothing else",
        needles.make_multikey_lines,
        None,
        4 * MANY,
    ),
    ("niah_multikey_3", "the same, all UUIDs", needles.make_multikey_uuids, None, 4 * MANY),
    ("niah_multivalue", "four values of one key", needles.make_multivalue, "noise", MANY),
    ("niah_multiquery", "four keys in one question", needles.make_multiquery, "noise", MANY),
    ("vt", "variables assigned to one another", tracing.make_tracking, "noise", MANY),
    ("cwe", "the ten most common words", tracing.make_common_words, None, 1),
    ("fwe", "the three most frequent coded words", tracing.make_frequent_words, None, 1),
    ("passkey", "a five-digit pass key in filler", infinite.make_passkey, "filler", 1),
    (
        "number_string",
        "ten digits with repetitions in filler",
        infinite.make_number_string,
        "filler",
        1,
    ),
    ("kv_retrieval", "a value of a long JSON object", infinite.make_kv_retrieval, None, 4 * MANY),
    ("math_find", "the largest or smallest of many numbers", infinite.make_math_find, None, 6),
)
TASKS = MappingProxyType(
    {
        name: Task(name=name, about=about, make=make, background=background, max_questions=most)
        for name, about, make, background, most in _ROWS
    }
)


def find_task(name: str) -> Task:
    """Returns a task.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in TASKS:
        raise UsageError(f"there is no task {name}", hint=f"Tasks: {', '.join(TASKS)}.")
    return TASKS[name]
