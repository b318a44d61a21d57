"""What is evaluated: tasks × lengths × policies, with so many questions on so many haystacks."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from tsdoc.errors import UsageError
from tsdoc.eval.background import Kind, make_background
from tsdoc.eval.datasets import Example
from tsdoc.eval.haystack import Draft, Haystack, build_haystack
from tsdoc.eval.tasks import Task
from tsdoc.eval.tasks.request import Request
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.prompt.tokenizer import TextTokenizer

TEMPLATE_TOKENS = 512  # more than a chat template adds
VERSION = 1  # of the tasks: a change of wording or drawing makes other items


class Work(Protocol):
    """One haystack to be prefilled, and its questions."""

    @property
    def task_name(self) -> str:
        """Which cell it counts for."""

    @property
    def length(self) -> int:
        """The cell's length in tokens; 0 where each item has its own."""

    @property
    def name(self) -> str:
        """Everything that decides the haystack."""

    @property
    def num_questions(self) -> int:
        """Questions that share it."""

    @property
    def most_tokens(self) -> int:
        """Tokens with question and answer, at most."""

    def build(self, tokenizer: TextTokenizer, template: ChatTemplate) -> Haystack:
        """Makes it.

        Raises:
            UsageError: the length is too short for the task, or the document for the length.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The haystacks to be made.

    Attributes:
        tasks: Generated tasks.
        lengths: In tokens, question and answer included.
        items: Questions in each cell, as far as `haystacks` allows.
        haystacks: Prefills in each cell at most.
        backgrounds: What haystacks are made of, in turn, where it is not part of the task; empty is
            each task's own.
        document: Pieces of the user's document.
        examples: Items of benchmark files.
    """

    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    items: int
    haystacks: int
    seed: int
    backgrounds: tuple[Kind, ...]
    document: tuple[str, ...]
    examples: tuple[Example, ...] = ()

    def jobs(self) -> list[Work]:
        """Everything to be prefilled, shortest first, then the files."""
        made = [
            Job(plan=self, task=task, length=length, number=number, num_questions=count)
            for length in sorted(self.lengths)
            for task in self.tasks
            for number, count in enumerate(self._shares(task))
        ]
        given = [
            FileJob(example=example, number=number, digest=_digest(asdict(example)))
            for number, example in enumerate(self.examples)
        ]
        return [*made, *given]

    def _shares(self, task: Task) -> list[int]:
        """Questions for each haystack of a cell."""
        most = min(self.items, self.haystacks * task.max_questions)
        count = min(self.haystacks, most)
        return [most // count + (number < most % count) for number in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One haystack of a generated task."""

    plan: Plan
    task: Task
    length: int
    number: int
    num_questions: int

    @property
    def task_name(self) -> str:
        """See `Work.task_name`."""
        return self.task.name

    @property
    def most_tokens(self) -> int:
        """See `Work.most_tokens`."""
        return self.length

    @property
    def kind(self) -> Kind | None:
        """What the haystack is made of; None where the task decides."""
        if self.task.background is None:
            return None
        kinds = self.plan.backgrounds or (self.task.background,)
        return kinds[self.number % len(kinds)]

    @property
    def name(self) -> str:
        """See `Work.name`."""
        parts = [
            self.task.name, self.kind or "own", f"{self.length}", f"{self.num_questions}q",
            f"seed{self.plan.seed}", f"#{self.number}", f"v{VERSION}",
        ]  # fmt: skip
        return "/".join(parts)

    def build(self, tokenizer: TextTokenizer, template: ChatTemplate) -> Haystack:
        """See `Work.build`."""
        rng = random.Random(self.name)  # noqa: S311 - to be repeatable, not secret

        def background() -> Iterator[str]:
            if self.kind is None:
                raise UsageError("this task has no background", where=self.task.name)
            return make_background(self.kind, rng, self.plan.document)

        request = Request(rng=rng, num_questions=self.num_questions, background=background)
        return build_haystack(self.task.make(request), self.length, tokenizer, template)


def digest_pieces(pieces: Sequence[str]) -> str | None:
    """Returns a hex digest of a document's pieces; None without a document."""
    return _digest(list(pieces)) if pieces else None


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode("ascii")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileJob:
    """One item of a benchmark's file."""

    example: Example
    number: int
    digest: str

    @property
    def task_name(self) -> str:
        """See `Work.task_name`."""
        return f"{self.example.benchmark}/{self.example.task}"

    @property
    def length(self) -> int:
        """See `Work.length`."""
        return 0

    @property
    def name(self) -> str:
        """See `Work.name`."""
        return f"{self.task_name}/{self.digest[:16]}/#{self.number}"

    @property
    def num_questions(self) -> int:
        """See `Work.num_questions`."""
        return 1

    @property
    def most_tokens(self) -> int:
        """See `Work.most_tokens`."""
        question = self.example.question
        texts = len(self.example.context) + len(question.text)
        return texts + question.max_new_tokens + TEMPLATE_TOKENS

    def build(self, tokenizer: TextTokenizer, template: ChatTemplate) -> Haystack:
        """See `Work.build`."""
        draft = Draft(
            lead="",
            background=[f"{self.example.context}\n"],
            needles=(),
            ask=lambda taken: [self.example.question],
        )
        return build_haystack(draft, None, tokenizer, template)
