"""What a task is asked to make."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tsdoc.eval.haystack import Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One haystack to be made.

    Attributes:
        rng: Draws everything.
        num_questions: How many questions share the haystack.
        background: Makes the text that is no part of the task, for tasks that have such a text.
    """

    rng: random.Random
    num_questions: int
    background: Callable[[], Iterator[str]]


Make = Callable[[Request], Draft]
