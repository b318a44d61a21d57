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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Everything a run needs.

    Attributes:
        jobs: Haystacks; those whose results are there already are passed over.
        window: Of the model, in tokens.
        load: Loads the model when there is something to run.
    """

    jobs: Sequence[Work]
    policies: Sequence[PolicyChoice]
    tokenizer: TextTokenizer
    template: ChatTemplate
    window: int
    load: Callable[[], ModelContext]
    results: ResultFile
    reporter: Reporter

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
        self._say_cost(open_jobs)
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
        progress.learn(haystack.ids.size, prefill_s, items)

    def _say_cost(self, open_jobs: dict[str, list[Work]]) -> None:
        jobs = [job for todo in open_jobs.values() for job in todo]
        tokens = sum(job.length for job in jobs)
        questions = sum(job.num_questions for job in jobs)
        haystacks = format_count(len(jobs), "haystack")
        known = f"{tokens:,} tokens to prefill in {haystacks}, " if tokens else ""
        asked = format_count(questions, "question")
        self.reporter.note(f"{known}{asked} to answer; nothing goes to the store")


class _Progress:
    """Shows how far the run is, and says after the first haystack how long it will take."""

    def __init__(self, reporter: Reporter, total: int) -> None:
        self._reporter = reporter
        self._total = total
        self._done = 0
        self._shown = 0
        self._started = False
        self._begun = time.perf_counter()
        self._said = False

    def begin(self) -> None:
        """A haystack begins."""
        if not self._started:
            self._reporter.start("eval", self._total, "tokens")
            self._started = True
        self._shown = self._done

    def prefilled(self, tokens: int) -> None:
        """So many tokens of the haystack are prefilled."""
        self._reporter.advance(min(self._done + tokens, self._total))
        self._shown = self._done + tokens

    def answered(self) -> None:
        """One more question is answered."""
        self._shown += ANSWER_TOKENS
        self._reporter.advance(min(self._shown, self._total))

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
    return (job.length or job.most_tokens // 4) + ANSWER_TOKENS * job.num_questions


def _score(question: Question, prediction: str) -> float:
    text = prediction.lstrip("\n").split("\n")[0] if question.first_line else prediction
    return score(question.metric, text, question.answers, question.classes)
