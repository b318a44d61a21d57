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
class _OpenJob:
    """A haystack, and the numbers of its questions that one policy has not answered yet."""

    work: Work
    numbers: Sequence[int]

    @property
    def prefill_tokens(self) -> int:
        """Length of the haystack; of one whose text is not tokenised yet, about."""
        return self.work.length or self.work.most_tokens // 4

    @property
    def weight(self) -> int:
        """Tokens that it counts in the progress shown."""
        return self.prefill_tokens + ANSWER_TOKENS * len(self.numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Everything a run needs.

    Attributes:
        jobs: Haystacks; questions whose answers are there already are passed over.
        window: Of the model, in tokens.
        check_memory: Refuses a length, in tokens, that memory cannot hold.
        load: Loads the model when there is something to run.
        on_kept: Told before the first answer, and after each one.
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
        """Answers what is not answered yet; an interruption loses the current answer alone.

        Raises:
            UsageError: a length does not hold its task, or a policy does not fit the model.
            ResourceError: memory or disk does not suffice.
        """
        open_jobs = {choice.label: self._open_jobs(choice) for choice in self.policies}
        jobs = [job for todo in open_jobs.values() for job in todo]
        if not jobs:
            self.reporter.note("everything has been answered before; nothing is run")
            return
        self.check_memory(max(job.work.length for job in jobs))
        self._say_cost(jobs)
        self._say_kept()
        progress = _Progress(self.reporter, sum(job.weight for job in jobs))
        context = self.load()
        built: dict[str, Haystack] = {}
        for choice in self.policies:
            if not open_jobs[choice.label]:
                continue
            contender = choice.start(context)
            for job in open_jobs[choice.label]:
                name = job.work.name
                if name not in built:
                    built[name] = job.work.build(self.tokenizer, self.template)
                if self._fits(choice, built[name]):
                    self._run_job(choice, contender, job, built[name], progress)
                progress.finish_job(job)
        self.reporter.finish()

    def _open_jobs(self, choice: PolicyChoice) -> list[_OpenJob]:
        window, todo = self.window, []
        for job in self.jobs:
            if choice.in_window and job.length > window:
                self.reporter.warn(
                    "outside_window",
                    choice.label,
                    f"{job.length:,} tokens are outside the model's trained window of {window:,}: "
                    "left out",
                )
                continue
            answered = self.results.answered(choice.label, job.name)
            numbers = [n for n in range(job.num_questions) if n not in answered]
            if numbers:
                todo.append(_OpenJob(work=job, numbers=numbers))
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
        job: _OpenJob,
        haystack: Haystack,
        progress: _Progress,
    ) -> None:
        progress.begin()
        begun = time.perf_counter()
        contender.prefill(haystack.ids, progress.prefilled)
        prefill_s = time.perf_counter() - begun
        for number in job.numbers:
            question = haystack.questions[number]
            reply = contender.answer(haystack.question_ids[number], question.max_new_tokens)
            text = self.tokenizer.decode(reply.tokens)
            self.results.add(
                ItemResult(
                    policy=choice.label,
                    task=job.work.task_name,
                    length=job.work.length,
                    haystack=job.work.name,
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
            self._say_kept()
            progress.answered()
        progress.learn(haystack.ids.size + ANSWER_TOKENS * len(job.numbers))

    def _say_cost(self, jobs: Sequence[_OpenJob]) -> None:
        """Says what there is to do, in the unit of the progress."""
        total = sum(job.weight for job in jobs)
        tokens = sum(job.prefill_tokens for job in jobs)
        about = "" if all(job.work.length for job in jobs) else "about "
        haystacks = format_count(len(jobs), "haystack")
        asked = format_count(sum(len(job.numbers) for job in jobs), "question")
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

    def finish_job(self, job: _OpenJob) -> None:
        """A haystack is over, or was passed over."""
        self._done += job.weight
        if self._started:
            self._reporter.advance(self._done)

    def learn(self, tokens: int) -> None:
        """Says once, after a haystack of `tokens`, about how long the rest will take."""
        if self._said:
            return
        self._said = True
        spent = time.perf_counter() - self._begun
        share = tokens / self._total
        left = spent / share - spent if share else 0.0
        if left > LONG_S:
            self._reporter.note(
                f"about {left / 60:.0f} min more; results are kept as they come, Ctrl-C is safe"
            )


def _score(question: Question, prediction: str) -> float:
    text = prediction.lstrip("\n").split("\n")[0] if question.first_line else prediction
    return score(question.metric, text, question.answers, question.classes)
