"""One document, one model, any number of questions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING

from tsdoc.errors import CorruptPageError
from tsdoc.home import Home
from tsdoc.ingest.document import Document, IngestWarning
from tsdoc.ingest.narrow import ways_to_narrow
from tsdoc.kernels.devices import Device, resolve_device
from tsdoc.kernels.shared_kv import HostPiece, make_host_piece
from tsdoc.models.locate import LocatedModel
from tsdoc.parallel.job import check_parallel
from tsdoc.progress import Reporter
from tsdoc.prompt.assemble import Prompt
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.prompt.tokenizer import TextTokenizer
from tsdoc.session.attempts import Attempts
from tsdoc.session.calibration import Calibration
from tsdoc.session.engines import Engines
from tsdoc.session.loading import warn_of_few_cores
from tsdoc.session.prefill import Prefill
from tsdoc.session.prompt_kv import KeptPrompt
from tsdoc.session.question import lay_out
from tsdoc.session.resolving import (
    kv_shape,
    model_key,
    reread_tokens,
    resolve_compute_dtype,
    uses_index,
)
from tsdoc.session.results import Answer, Estimate, Prepared
from tsdoc.session.tail import Tail
from tsdoc.session.transcript import Transcript
from tsdoc.settings import Settings
from tsdoc.store.key import ModelKey

if TYPE_CHECKING:
    from tsdoc.engine.engine import Engine
    from tsdoc.engine.evidence import Neutral
    from tsdoc.engine.generate import Generation
    from tsdoc.engine.reread import Reread
    from tsdoc.session.evidence import EvidenceFinder
    from tsdoc.store import Store

SHOWN_FILES = 100  # names kept with an entry, for `tsdoc cache show`


@dataclass(slots=True, kw_only=True)
class Session:
    """A context manager that releases the store's locks at its end.

    Attributes:
        model: The model in use.
        document: What was read.
        prompt: Its tokens and the map back to the document.
        warnings: Trouble with parts of the input, already reported.
        times_s: Seconds per stage so far.
        record: Key of the source record, which lives as long as the entry.
        part: What of the sources was read, "" for all.
        device: Where the model runs.
    """

    settings: Settings
    home: Home
    reporter: Reporter
    model: LocatedModel
    tokenizer: TextTokenizer
    template: ChatTemplate
    document: Document
    prompt: Prompt
    warnings: list[IngestWarning]
    times_s: dict[str, float]
    record: str
    part: str
    device: Device = field(init=False)
    _kept: KeptPrompt = field(init=False)
    _engines: Engines = field(init=False)
    _num_answers: int = field(default=0, init=False)
    _last: tuple[Engine, Generation] | None = field(default=None, init=False)
    _neutral: Neutral | None = field(default=None, init=False)
    _finder: EvidenceFinder | None = field(default=None, init=False)
    _resources: ExitStack = field(default_factory=ExitStack, init=False)

    def __post_init__(self) -> None:
        config, settings = self.model.config, self.settings
        self.device = resolve_device(settings.engine.device)
        check_parallel(settings.parallel, config, settings.selection, self.device)
        warn_of_few_cores(settings.parallel, self.device, self.reporter)
        compute_dtype = resolve_compute_dtype(settings.engine, self.model, self.device)
        key = model_key(self.model.fingerprint, config, settings, compute_dtype)
        self._engines = Engines(
            model=self.model,
            settings=settings,
            compute_dtype=key.compute_dtype,
            device=self.device,
            times_s=self.times_s,
        )
        self._resources.callback(self._engines.close)
        job = Prefill(
            store=_open_store(settings, self.home, self.reporter),
            key=key,
            shape=kv_shape(config, settings.engine.kv_dtype),
            ids=self.prompt.ids,
            prefill_block=settings.engine.prefill_block,
            name=self.document.name,
            meta={
                "sources": [file.name for file in self.document.files[:SHOWN_FILES]],
                "num_files": len(self.document.files),
                "model": self.model.name,
                "record": self.record,
                "part": self.part,
            },
            make_engine=self._engines.make,
            calibration=Calibration.of(settings, home=self.home, model_key=key.digest),
            reporter=self.reporter,
            narrowing=ways_to_narrow(self.document),
        )
        self._kept = KeptPrompt(
            job,
            settings=settings,
            device=self.device,
            engines=self._engines,
            times_s=self.times_s,
        )
        self._resources.callback(self._kept.close)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._last = None
        self._resources.close()

    @property
    def model_key(self) -> ModelKey:
        """What K and V of the prompt depend on besides its tokens."""
        return self._kept.job.key

    def estimate(self) -> Estimate:
        """Looks up what the store already holds; computes nothing."""
        return self._kept.estimate()

    def prepare(self, *, must_keep: bool = False) -> Prepared:
        """Makes K and V of the whole prompt available: opened, resumed or computed.

        Args:
            must_keep: Fails where the store has no room, instead of going on in memory.

        Raises:
            ResourceError: neither disk nor memory can hold them.
            ModelError: the weights cannot be loaded.
        """
        kv = self._kept.get(must_keep=must_keep)
        return Prepared(
            prompt_tokens=len(self.prompt.ids),
            reused_tokens=kv.estimate.reused_tokens,
            computed_tokens=kv.estimate.prefill_tokens,
            kept=kv.entry is not None,
            entry_id=kv.entry.entry_id if kv.entry is not None else None,
            estimate=kv.estimate,
            outcome=kv.outcome,
            times_s=dict(self.times_s),
        )

    def ask(
        self,
        question: str,
        on_text: Callable[[str], None],
        *,
        tail: Tail | None = None,
        allowed: Sequence[tuple[int, int]] | None = None,
        max_new_tokens: int | None = None,
        keep_queries: bool = False,
        reread: bool = True,
    ) -> Answer:
        """Answers one question.

        Args:
            question: The question.
            on_text: Receives the answer as it comes; StopAnswer from it ends the answer. What a
                loop repeats is held back.
            tail: The conversation that the question goes on with; it grows by this turn. Ctrl-C
                then ends the answer as it is, once it has begun.
            allowed: Restricts selection to these ranges of prompt positions (parts of the document)
                and to what stands behind the prompt.
            max_new_tokens: Instead of the settings' value.
            keep_queries: Makes `find_evidence` possible.
            reread: Reads again what the question looks at, as the settings say, unless `allowed`
                restricts it.

        Raises:
            ResourceError: prompt, question and answer exceed max_prompt_tokens.
            UsageError: the selection settings do not fit the model's window.
            ModelError: the model's template allows no second question.
        """
        if tail is not None:
            self._engines.renew()  # however long it was since the last turn
        before, prompt_len = tail or Tail(), len(self.prompt.ids)
        asked = lay_out(
            question,
            before,
            prompt=self.prompt,
            template=self.template,
            settings=self.settings,
            stop_ids=frozenset(self.model.config.eos_token_ids),
            max_new_tokens=max_new_tokens,
            allowed=allowed,
            keep_queries=keep_queries,
            reread=self._make_reread() if reread and allowed is None else None,
        )
        kv = self._kept.get()
        engine = self._engines.make(asked.start + asked.room)
        begun = time.perf_counter()
        stop_loops = self.settings.answer.stop_loops
        answer = Transcript(self.tokenizer, on_text, stop_loops=stop_loops)
        attempts = Attempts(
            kept=self._kept,
            engine=engine,
            make_piece=self._room,
            # Further questions of this process reuse what the first one had to wait for.
            reused_tokens=kv.estimate.reused_tokens if self._num_answers == 0 else prompt_len,
        )
        generation, piece = attempts.run(asked, before, answer, interruptible=tail is not None)
        question_len = len(generation.question)
        if tail is not None:
            generation.keep()
            turn = list(generation.question[len(asked.ids) - asked.num_asked :])
            end = asked.start + question_len + answer.num_tokens
            said = generation.tokens[: answer.num_tokens]
            tail.append(turn + said, piece, min(end, generation.end))
        total_s = time.perf_counter() - begun
        first_s = answer.first_token_at - begun if answer.num_tokens else total_s
        self._num_answers += 1
        self._last = (engine, generation) if keep_queries else None
        return Answer(
            question=question,
            text=answer.text,
            finish_reason=generation.finish_reason or attempts.ended,
            prompt_tokens=asked.start + question_len,
            reread_tokens=question_len - len(asked.ids),
            reused_tokens=max(attempts.reused_tokens, 0) + asked.start - prompt_len,
            generated_tokens=len(generation.tokens),
            selection_steps=generation.reuse.num_lookups,
            selection_hits=generation.reuse.num_hits,
            times_s={"first_token": first_s, "decode": total_s - first_s},
        )

    def find_evidence(self, answer: Answer, *, count: int) -> Answer:
        """Returns the last answer with up to `count` passages that the model looked at.

        The document's keys are read once more. `answer` was asked for with `keep_queries`, and
        nothing since.
        """
        from tsdoc.session.evidence import EvidenceFinder

        assert self._last is not None  # noqa: S101 - there is an answer
        begun = time.perf_counter()
        if self._finder is None:
            self._finder = EvidenceFinder(
                prompt=self.prompt, neutral=self._make_neutral(), make_piece=self._room
            )
        engine, generation = self._last
        kv = self._kept.get()
        while True:
            try:
                evidence = self._finder.find(engine, generation, kv.pieces, count=count)
                break
            except CorruptPageError as error:
                self._kept.repair(engine, error)
        times_s = {**answer.times_s, "evidence": time.perf_counter() - begun}
        return replace(answer, evidence=evidence, times_s=times_s)

    def _make_neutral(self) -> Neutral:
        from tsdoc.engine.evidence import make_neutral
        from tsdoc.session.evidence import EntryVotes

        if self._neutral is None:
            prompt = self.prompt
            document = prompt.head_len, prompt.contents_start
            kept = EntryVotes(lambda: self._kept.entry)
            num_tokens, on_cpu = len(prompt.ids), self.device == "cpu"
            by_index = on_cpu and uses_index(self.settings, self.device, num_tokens)
            self._neutral = make_neutral(
                self.template, document, num_tokens, kept, by_index=by_index
            )
        return self._neutral

    def _make_reread(self) -> Reread | None:
        from tsdoc.engine.reread import make_reread

        num_tokens = reread_tokens(self.settings.engine, self.device)
        return make_reread(self.template, self.prompt.ids, self._make_neutral(), num_tokens)

    def _room(self, start: int, capacity: int) -> HostPiece:
        """Room for a question and its answer behind the prompt."""
        shape = self._kept.job.shape
        return make_host_piece(
            start=start,
            capacity=capacity,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            kv_dtype=shape.kv_dtype,
            num_ranks=self.settings.parallel.size,
        )


def _open_store(settings: Settings, home: Home, reporter: Reporter) -> Store | None:
    if not settings.store.enabled:
        return None
    from tsdoc.store import Store

    return Store(home.store, max_bytes=settings.store.max_bytes, on_warning=reporter.warn)
