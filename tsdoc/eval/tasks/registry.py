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

TASKS = MappingProxyType(
    {
        task.name: task
        for task in (
            Task(
                name="niah_single_1", about="one fact in repeated filler",
                make=needles.make_single, background="filler", max_questions=MANY,
            ),
            Task(
                name="niah_single_2", about="one fact in prose",
                make=needles.make_single, background="noise", max_questions=MANY,
            ),
            Task(
                name="niah_single_3", about="one fact in prose, a UUID",
                make=needles.make_single_uuid, background="noise", max_questions=MANY,
            ),
            Task(
                name="niah_multikey_1", about="one fact among 4 of its kind",
                make=needles.make_multikey, background="noise", max_questions=4 * MANY,
            ),
            Task(
                name="niah_multikey_2", about="one fact in a text of nothing else",
                make=needles.make_multikey_lines, background=None, max_questions=4 * MANY,
            ),
            Task(
                name="niah_multikey_3", about="the same, all UUIDs",
                make=needles.make_multikey_uuids, background=None, max_questions=4 * MANY,
            ),
            Task(
                name="niah_multivalue", about="four values of one key",
                make=needles.make_multivalue, background="noise", max_questions=MANY,
            ),
            Task(
                name="niah_multiquery", about="four keys in one question",
                make=needles.make_multiquery, background="noise", max_questions=MANY,
            ),
            Task(
                name="vt", about="variables assigned to one another",
                make=tracing.make_tracking, background="noise", max_questions=MANY,
            ),
            Task(
                name="cwe", about="the ten most common words",
                make=tracing.make_common_words, background=None, max_questions=1,
            ),
            Task(
                name="fwe", about="the three most frequent coded words",
                make=tracing.make_frequent_words, background=None, max_questions=1,
            ),
            Task(
                name="passkey", about="a five-digit pass key in filler",
                make=infinite.make_passkey, background="filler", max_questions=1,
            ),
            Task(
                name="number_string", about="ten digits with repetitions in filler",
                make=infinite.make_number_string, background="filler", max_questions=1,
            ),
            Task(
                name="kv_retrieval", about="a value of a long JSON object",
                make=infinite.make_kv_retrieval, background=None, max_questions=4 * MANY,
            ),
            Task(
                name="math_find", about="the largest or smallest of many numbers",
                make=infinite.make_math_find, background=None, max_questions=6,
            ),
        )
    }
)  # fmt: skip


def find_task(name: str) -> Task:
    """Returns a task.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in TASKS:
        raise UsageError(f"there is no task {name}", hint=f"Tasks: {', '.join(TASKS)}.")
    return TASKS[name]
