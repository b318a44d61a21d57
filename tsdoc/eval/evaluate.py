"""`tsdoc eval` as a library: from a request to cells of scores."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsdoc.errors import UsageError
from tsdoc.eval.background import Kind, split_document
from tsdoc.eval.datasets import load_examples
from tsdoc.eval.fidelity import make_texts, measure_fidelity
from tsdoc.eval.plan import Plan, digest_pieces
from tsdoc.eval.policies import ModelContext, PolicyChoice, parse_policy
from tsdoc.eval.policies.interface import SHORTER
from tsdoc.eval.request import (
    DEFAULT_HAYSTACKS,
    DEFAULT_ITEMS,
    DEFAULT_LENGTHS,
    DEFAULT_TASKS,
    WHOLE,
    Difference,
    EvalReport,
    EvalRequest,
)
from tsdoc.eval.results import ItemResult, ResultFile, make_cells, paired_difference
from tsdoc.eval.run import Evaluation, OnKept
from tsdoc.eval.tasks import Task, find_task
from tsdoc.home import Home, private_dir
from tsdoc.ingest.document import Document
from tsdoc.ingest.options import IngestOptions
from tsdoc.ingest.sources import check_complete, read_sources
from tsdoc.kernels.devices import Device, resolve_device
from tsdoc.progress import Reporter
from tsdoc.session.loading import load_model
from tsdoc.session.memory import check_kv_memory
from tsdoc.session.opening import OpenedModel, open_model
from tsdoc.session.resolving import (
    index_kind,
    kv_shape,
    reread_tokens,
    resolve_compute_dtype,
)
from tsdoc.settings import ParallelSettings, Settings
from tsdoc.store.files import STORE_NOT_WRITABLE


def _ignore(kept: int, total: int) -> None:
    """Takes what nobody asked for."""


def evaluate(
    request: EvalRequest,
    *,
    settings: Settings,
    home: Home,
    ingest: IngestOptions,
    reporter: Reporter,
    offline: bool,
    on_kept: OnKept = _ignore,
) -> EvalReport:
    """Runs what has not been run before, and reports on all of the request.

    Args:
        request: What is measured.
        settings: Of the model and the engine.
        home: Where results are kept unless the request says where.
        ingest: How the request's sources are read.
        reporter: Is told how far it is.
        offline: Forbids downloads.
        on_kept: Told how many of the answers are kept, where they are; see `Evaluation`.

    Raises:
        UsageError: an unknown task or policy, a length that holds no task, a foreign result file.
        InputError: a source or a benchmark's file cannot be read.
        ModelError: the model cannot be had or loaded.
        ResourceError: memory or disk does not suffice.
    """
    settings.parallel.refuse("tsdoc eval")
    _check_request(request)
    choices = [parse_policy(text, settings) for text in request.policies]
    tasks = _tasks(request)
    examples = list(
        itertools.chain.from_iterable(
            load_examples(path, limit=request.items) for path in request.files
        )
    )
    document = _read(request.sources, ingest, reporter)
    opened = open_model(settings=settings, home=home, reporter=reporter, offline=offline)
    device = resolve_device(settings.engine.device)
    pieces = tuple(split_document(document)) if document else ()
    subject = _Subject(
        request=request,
        settings=settings,
        choices=choices,
        opened=opened,
        device=device,
        compute_dtype=resolve_compute_dtype(settings.engine, opened.model, device),
        document=document,
        pieces=pieces,
        document_tokens=sum(ids.size for ids, _ in opened.tokenizer.encode_many(pieces)),
        reporter=reporter,
    )
    if request.fidelity:
        return _compare(subject)
    plan = Plan(
        tasks=tasks,
        lengths=subject.lengths() if tasks else (),
        items=request.items or DEFAULT_ITEMS[device],
        haystacks=subject.haystacks,
        seed=request.seed,
        backgrounds=subject.backgrounds,
        document=pieces,
        examples=tuple(examples),
    )
    header = subject.header()
    results = ResultFile(_path(request, home, settings, header), header)
    return _run(subject, plan, results, on_kept if results.path is not None else _ignore)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """What is evaluated, and on which text."""

    request: EvalRequest
    settings: Settings
    choices: Sequence[PolicyChoice]
    opened: OpenedModel
    device: Device
    compute_dtype: str
    document: Document | None
    pieces: tuple[str, ...]
    document_tokens: int
    reporter: Reporter

    @property
    def haystacks(self) -> int:
        """Texts in each cell."""
        return self.request.haystacks or DEFAULT_HAYSTACKS[self.device]

    @property
    def backgrounds(self) -> tuple[Kind, ...]:
        """What the texts are made of; empty is each task's own."""
        return self.request.backgrounds or (("document",) if self.pieces else ())

    def lengths(self, most: int | None = None) -> tuple[int, ...]:
        """The lengths asked for; by default those up to `most` that the document fills."""
        asked, num_tokens = self.request.lengths, self.document_tokens
        if asked is not None:
            return tuple(dict.fromkeys(length or num_tokens for length in asked))
        lengths = [n for n in DEFAULT_LENGTHS[self.device] if most is None or n <= most]
        if not num_tokens:
            return tuple(lengths)
        fitting = tuple(length for length in lengths if length <= num_tokens)
        if not fitting:
            self.reporter.note(f"the document has {num_tokens:,} tokens: all of it is used")
        return fitting or (num_tokens,)

    def check_memory(self, num_tokens: int) -> None:
        """Refuses texts of a length whose K and V this machine cannot hold, before they are made.

        Raises:
            ResourceError: they do not fit.
        """
        config, kv_dtype = self.opened.model.config, self.settings.engine.kv_dtype
        check_kv_memory(num_tokens, kv_shape(config, kv_dtype), self.device, hint=SHORTER)

    def context(self, max_tokens: int) -> ModelContext:
        """Loads the model for prompts of up to `max_tokens`."""
        loaded = load_model(
            self.opened.model,
            self.settings.engine,
            self.compute_dtype,
            self.device,
            ParallelSettings(),  # one process: policies have caches of their own
        )
        return ModelContext(
            config=self.opened.model.config,
            settings=self.settings,
            decoder=loaded.decoder,
            backend=loaded.backend,
            template=self.opened.template,
            max_tokens=max_tokens,
            steps=loaded.steps,
        )

    def header(self) -> dict[str, Any]:
        """What decides the answers beside policy and haystack."""
        engine = self.settings.engine
        return {
            "model": self.opened.model.name,
            "fingerprint": self.opened.model.fingerprint,
            "template": self.opened.template.fingerprint,
            "device": self.device,
            "compute_dtype": self.compute_dtype,
            "kv_dtype": engine.kv_dtype,
            "decode_weights": engine.decode_weights,
            "theta": engine.theta,
            "question_chunk_size": engine.question_chunk_size,
            "reread_tokens": reread_tokens(engine, self.device),
            "index": index_kind(engine, self.device),
            "index_candidates": engine.index_candidates,
            "selection": self.settings.selection.model_dump(),
            "document": digest_pieces(self.pieces),
        }

    def report(self, **found: Any) -> EvalReport:
        """A report with what is known already."""
        empty = {"cells": (), "differences": (), "items": (), "fidelity": (), "path": None}
        return EvalReport(
            model=self.opened.model.name,
            licence=self.opened.model.licence,
            device=self.device,
            window=self.opened.model.config.window,
            document=self.document.name if self.document else None,
            document_tokens=self.document_tokens,
            **{**empty, **found},
        )


def _run(subject: _Subject, plan: Plan, results: ResultFile, on_kept: OnKept) -> EvalReport:
    jobs = plan.jobs()
    Evaluation(
        jobs=jobs,
        policies=subject.choices,
        tokenizer=subject.opened.tokenizer,
        template=subject.opened.template,
        window=subject.opened.model.config.window,
        check_memory=subject.check_memory,
        load=functools.partial(subject.context, max(job.most_tokens for job in jobs)),
        results=results,
        reporter=subject.reporter,
        on_kept=on_kept,
    ).run()
    labels, names = [choice.label for choice in subject.choices], {job.name for job in jobs}
    items = [i for i in results.items if i.policy in labels and i.haystack in names]
    items.sort(key=lambda item: labels.index(item.policy))
    return subject.report(
        cells=tuple(make_cells(items)),
        differences=tuple(_differences(items, labels)),
        items=tuple(items),
        path=results.path,
    )


def _compare(subject: _Subject) -> EvalReport:
    lengths = subject.lengths(most=subject.opened.model.config.window)
    subject.check_memory(max(lengths))
    texts = functools.partial(
        make_texts,
        count=subject.haystacks,
        kinds=subject.backgrounds or ("noise",),
        document=subject.pieces,
        seed=subject.request.seed,
        tokenizer=subject.opened.tokenizer,
        template=subject.opened.template,
    )
    context = subject.context(max(lengths))
    rows = measure_fidelity(subject.choices, lengths, texts, context, subject.reporter)
    return subject.report(fidelity=tuple(rows))


def _check_request(request: EvalRequest) -> None:
    """Refuses, before a model is fetched, what could not be done with any.

    Raises:
        UsageError: results go to no file, or there is no document and one is needed.
    """
    if request.out == Path("-"):
        raise UsageError("results go into a file, which a later run goes on with", where="--out -")
    if request.out is not None and not request.out.parent.is_dir():
        raise UsageError("its directory does not exist", where=str(request.out))
    if request.sources:
        return
    if request.lengths is not None and WHOLE in request.lengths:
        raise UsageError("a length of the whole document needs --source")
    if "document" in request.backgrounds:
        raise UsageError("a haystack of a document needs --source")


def _tasks(request: EvalRequest) -> tuple[Task, ...]:
    names = request.tasks
    if names is None:
        names = () if request.files else DEFAULT_TASKS
    return tuple(find_task(name) for name in names)


def _read(sources: Sequence[str], ingest: IngestOptions, reporter: Reporter) -> Document | None:
    if not sources:
        return None
    reporter.start("reading", None, "bytes")
    document = read_sources(sources, ingest, lambda name, done, total: reporter.advance(done))
    reporter.finish()
    for warning in document.warnings:
        reporter.warn(warning.code, warning.where, warning.message)
    if ingest.strict:
        check_complete(document)
    return document


def _path(
    request: EvalRequest, home: Home, settings: Settings, header: dict[str, Any]
) -> Path | None:
    if request.out is not None:
        return request.out
    if not settings.store.enabled:
        return None
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode("ascii")).hexdigest()
    return private_dir(home.evals, hint=STORE_NOT_WRITABLE) / f"{digest[:16]}.jsonl"


def _differences(items: Sequence[ItemResult], labels: Sequence[str]) -> list[Difference]:
    """Each further policy against the first."""
    by_policy = {label: [i for i in items if i.policy == label] for label in labels}
    first, *others = by_policy
    found = []
    for label in others:
        paired = paired_difference(by_policy[label], by_policy[first])
        if paired is not None:
            mean, low, high, n = paired
            found.append(Difference(policy=label, other=first, mean=mean, low=low, high=high, n=n))
    return found
