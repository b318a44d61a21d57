"""The evaluation itself: every policy reads every haystack once and answers its questions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tsdoc.eval.haystack import Haystack, Question
from tsdoc.eval.metrics import score
from tsdoc.eval.plan import Work
from tsdoc.eval.policies import Contender, ModelContext, PolicyChoice
from tsdoc.eval.results import ItemResult, ResultFile
from tsdoc.progress import Reporter
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.prompt.tokenizer import TextTokenizer
from tsdoc.terminal import format_count

LONG_S = 60.0
ANSWER_TOKENS = 250  # of a prefill, that take about as long as a question and its answer

OnKept = Callable[[int, int], None]
"""Takes how many answers the file of results holds, and how many there will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Everything a run needs.

    Attributes:
        jobs: Haystacks; those whose results are there already are passed over.
        window: Of the model, in tokens.
        check_memory: Refuses a length, in tokens, that memory cannot hold.
        load: Loads the model when there is something to run.
        on_kept: Told before the first haystack, and after each one.
    """

    jobs: Sequence[Work]
    policies: Sequence[PolicyChoice]
    tokenizer: TextTokenizer
    template: ChatTemplate
    window: int
    check_memory: Callable[[int], None]
    load: Callable[[], ModelContext]
    results: ResultFile
    reporter: Reporter
    on_kept: OnKept

    def run(self) -> None:
        """Answers what is not answered yet; an interruption loses the current haystack alone.

        Raises:
            UsageError: a length does not hold its task, or a policy does not fit the model.
            ResourceError: memory or disk does not suffice.
        """
        open_jobs = {choice.label: self._open_jobs(choice) for choice in self.policies}
        total = sum(_weight(job) for jobs in open_jobs.values() for job in jobs)
        if not total:
            self.reporter.note("everything has been answered before; nothing is run")
            return
        self.check_memory(max(job.length for jobs in open_jobs.values() for job in jobs))
        self._say_cost([job for jobs in open_jobs.values() for job in jobs], total)
        self._say_kept()
        progress = _Progress(self.reporter, total)
        context = self.load()
        built: dict[str, Haystack] = {}
        for choice in self.policies:
            if not open_jobs[choice.label]:
                continue
            contender = choice.start(context)
            for job in open_jobs[choice.label]:
                if job.name not in built:
                    built[job.name] = job.build(self.tokenizer, self.template)
                haystack = built[job.name]
                if self._fits(choice, haystack):
                    self._run_job(choice, contender, job, haystack, progress)
                progress.finish_job(job)
        self.reporter.finish()

    def _open_jobs(self, choice: PolicyChoice) -> list[Work]:
        window, todo = self.window, []
        for job in self.jobs:
            if choice.in_window and job.length > window:
                self.reporter.warn(
                    "outside_window",
                    choice.label,
                    f"{job.length:,} tokens are outside the model's trained window of {window:,}: "
                    "left out",
                )
            elif not self.results.holds(choice.label, job.name, job.num_questions):
                todo.append(job)
        return todo

    def _fits(self, choice: PolicyChoice, haystack: Haystack) -> bool:
        if not choice.in_window:
            return True
        longest = max(
            ids.size + question.max_new_tokens
            for ids, question in zip(haystack.question_ids, haystack.questions, strict=True)
        )
        return haystack.ids.size + longest <= self.window

    def _run_job(
        self,
        choice: PolicyChoice,
        contender: Contender,
        job: Work,
        haystack: Haystack,
        progress: _Progress,
    ) -> None:
        progress.begin()
        begun = time.perf_counter()
        contender.prefill(haystack.ids, progress.prefilled)
        prefill_s = time.perf_counter() - begun
        items = []
        for number, question in enumerate(haystack.questions):
            reply = contender.answer(haystack.question_ids[number], question.max_new_tokens)
            text = self.tokenizer.decode(reply.tokens)
            items.append(
                ItemResult(
                    policy=choice.label,
                    task=job.task_name,
                    length=job.length,
                    haystack=job.name,
                    item=number,
                    depth=question.depth,
                    score=_score(question, text),
                    prediction=text,
                    answers=question.answers,
                    prompt_tokens=haystack.ids.size + haystack.question_ids[number].size,
                    generated_tokens=len(reply.tokens),
                    prefill_s=prefill_s,
                    first_s=reply.first_s,
                    decode_s=reply.decode_s,
                    lookups=reply.lookups,
                    hits=reply.hits,
                    sampled=reply.sampled,
                    caught=reply.caught / reply.sampled if reply.sampled else None,
                )
            )
            progress.answered()
        self.results.add(items)
        self._say_kept()
        progress.learn(haystack.ids.size, prefill_s, items)

    def _say_cost(self, jobs: Sequence[Work], total: int) -> None:
        """Says what there is to do, in the unit of the progress."""
        tokens = sum(_prefill_tokens(job) for job in jobs)
        about = "" if all(job.length for job in jobs) else "about "
        haystacks = format_count(len(jobs), "haystack")
        asked = format_count(sum(job.num_questions for job in jobs), "question")
        self.reporter.note(
            f"{about}{total:,} tokens of work: {tokens:,} to prefill in {haystacks}, "
            f"{ANSWER_TOKENS} for each of {asked}; nothing goes to the store"
        )

    def _say_kept(self) -> None:
        """Tells how many of the answers that were asked for are in the file."""
        wanted = {
            (choice.label, job.name): job.num_questions
            for choice in self.policies
            for job in self.jobs
            if not (choice.in_window and job.length > self.window)
        }
        kept = sum((item.policy, item.haystack) in wanted for item in self.results.items)
        self.on_kept(kept, sum(wanted.values()))


class _Progress:
    """Shows how far the run is, and says after the first haystack how long it will take."""

    def __init__(self, reporter: Reporter, total: int) -> None:
        self._reporter = reporter
        self._total = total
        self._done = 0
        self._begun_tokens = 0  # of the current haystack
        self._started = False
        self._begun = time.perf_counter()
        self._said = False

    def begin(self) -> None:
        """A haystack begins."""
        if not self._started:
            self._reporter.start("eval", self._total, "tokens")
            self._started = True
            self._reporter.advance(self._done)
        self._begun_tokens = 0

    def prefilled(self, tokens: int) -> None:
        """So many tokens of the haystack are prefilled."""
        self._begun_tokens = tokens
        self._reporter.working(tokens)

    def answered(self) -> None:
        """One more question is answered."""
        self._begun_tokens += ANSWER_TOKENS
        self._reporter.working(self._begun_tokens)

    def finish_job(self, job: Work) -> None:
        """A haystack is over, or was passed over."""
        self._done += _weight(job)
        if self._started:
            self._reporter.advance(self._done)

    def learn(self, prefill_tokens: int, prefill_s: float, items: Sequence[ItemResult]) -> None:
        """Says once about how long the rest will take."""
        if self._said:
            return
        self._said = True
        spent = time.perf_counter() - self._begun
        share = (prefill_tokens + ANSWER_TOKENS * len(items)) / self._total
        left = spent / share - spent if share else 0.0
        if left > LONG_S:
            self._reporter.note(
                f"about {left / 60:.0f} min more; results are kept as they come, Ctrl-C is safe"
            )


def _weight(job: Work) -> int:
    """Tokens that a haystack counts in the progress shown."""
    return _prefill_tokens(job) + ANSWER_TOKENS * job.num_questions


def _prefill_tokens(job: Work) -> int:
    """Length of a haystack; of one whose text is not tokenised yet, about."""
    return job.length or job.most_tokens // 4


def _score(question: Question, prediction: str) -> float:
    text = prediction.lstrip("\n").split("\n")[0] if question.first_line else prediction
    return score(question.metric, text, question.answers, question.classes)
