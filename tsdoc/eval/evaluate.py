"""`tsdoc eval` as a library: from a request to cells of scores."""

from __future__ import annotations

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
from tsdoc.eval.plan import Plan, digest_pieces
from tsdoc.eval.policies import ModelContext, PolicyChoice, parse_policy
from tsdoc.eval.results import Cell, ItemResult, ResultFile, make_cells, paired_difference
from tsdoc.eval.run import Evaluation
from tsdoc.eval.tasks import Task, find_task
from tsdoc.home import Home, private_dir
from tsdoc.ingest.document import Document
from tsdoc.ingest.options import IngestOptions
from tsdoc.ingest.sources import check_complete, read_sources
from tsdoc.kernels.devices import Device, resolve_device
from tsdoc.progress import Reporter
from tsdoc.session.loading import load_model, resolve_compute_dtype
from tsdoc.session.opening import OpenedModel, open_model
from tsdoc.settings import Settings

WHOLE = 0  # a length: the whole document
DEFAULT_TASKS = ("niah_single_2", "niah_multikey_1")
DEFAULT_LENGTHS: dict[Device, tuple[int, ...]] = {
    "cpu": (4096, 8192),
    "cuda": (8192, 32_768, 131_072),
}
DEFAULT_ITEMS: dict[Device, int] = {"cpu": 10, "cuda": 20}
DEFAULT_HAYSTACKS: dict[Device, int] = {"cpu": 1, "cuda": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """What the user asked for; None is the default for device and document.

    Attributes:
        lengths: In tokens; `WHOLE` is the whole document.
        policies: As `parse_policy` reads them.
        sources: A document of the user's to hide things in.
        files: Files of InfiniteBench, RULER or LongBench; they replace the generated tasks unless
            `tasks` names some as well.
        out: Where results are kept; None is a file under the home.
    """

    tasks: tuple[str, ...] | None = None
    lengths: tuple[int, ...] | None = None
    policies: tuple[str, ...] = ("tokenselect",)
    items: int | None = None
    haystacks: int | None = None
    seed: int = 0
    background: Kind | None = None
    sources: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    out: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a policy is from the first one on the items both answered, with a 95 % interval."""

    policy: str
    other: str
    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """The outcome.

    Attributes:
        document: Name of the user's document; None without one.
        document_tokens: Its length.
        path: Where the results are kept.
    """

    model: str
    licence: str | None
    device: str
    window: int
    document: str | None
    document_tokens: int
    cells: tuple[Cell, ...]
    differences: tuple[Difference, ...]
    items: tuple[ItemResult, ...]
    path: Path | None


def evaluate(
    request: EvalRequest,
    *,
    settings: Settings,
    home: Home,
    ingest: IngestOptions,
    reporter: Reporter,
    offline: bool,
) -> EvalReport:
    """Runs what has not been run before, and reports on all of the request.

    Raises:
        UsageError: an unknown task or policy, a length that holds no task, a foreign result file.
        InputError: a source or a benchmark's file cannot be read.
        ModelError: the model cannot be had or loaded.
        ResourceError: memory or disk does not suffice.
    """
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
    num_tokens = _count(pieces, opened)
    plan = Plan(
        tasks=tasks,
        lengths=_lengths(request, device, num_tokens, reporter) if tasks else (),
        items=request.items or DEFAULT_ITEMS[device],
        haystacks=request.haystacks or DEFAULT_HAYSTACKS[device],
        seed=request.seed,
        background=request.background or ("document" if pieces else None),
        document=pieces,
        examples=tuple(examples),
    )
    compute_dtype = resolve_compute_dtype(settings.engine, opened.model, device)
    header = _header(opened, settings, device, compute_dtype, plan)
    results = ResultFile(_path(request, home, settings, header), header)
    jobs = plan.jobs()
    loaded = load_model(opened.model, settings.engine, compute_dtype, device)
    Evaluation(
        jobs=jobs,
        policies=choices,
        tokenizer=opened.tokenizer,
        template=opened.template,
        context=ModelContext(
            config=opened.model.config,
            settings=settings,
            decoder=loaded.decoder,
            backend=loaded.backend,
            max_tokens=max(job.most_tokens for job in jobs),
        ),
        results=results,
        reporter=reporter,
    ).run()
    labels, names = [choice.label for choice in choices], {job.name for job in jobs}
    items = [i for i in results.items if i.policy in labels and i.haystack in names]
    items.sort(key=lambda item: labels.index(item.policy))
    return EvalReport(
        model=opened.model.name,
        licence=opened.model.licence,
        device=device,
        window=opened.model.config.window,
        document=document.name if document else None,
        document_tokens=num_tokens,
        cells=tuple(make_cells(items)),
        differences=tuple(_differences(items, choices)),
        items=tuple(items),
        path=results.path,
    )


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


def _count(pieces: Sequence[str], opened: OpenedModel) -> int:
    return sum(ids.size for ids, _ in opened.tokenizer.encode_many(pieces))


def _lengths(
    request: EvalRequest, device: Device, document_tokens: int, reporter: Reporter
) -> tuple[int, ...]:
    """The lengths asked for; by default those that the document fills.

    Raises:
        UsageError: the whole document is asked for and there is none.
    """
    if request.lengths is not None:
        if WHOLE in request.lengths and not document_tokens:
            raise UsageError("a length of the whole document needs --source")
        return tuple(dict.fromkeys(length or document_tokens for length in request.lengths))
    lengths = DEFAULT_LENGTHS[device]
    if not document_tokens:
        return lengths
    fitting = tuple(length for length in lengths if length <= document_tokens)
    if not fitting:
        reporter.note(f"the document has {document_tokens:,} tokens: all of it is used")
    return fitting or (document_tokens,)


def _header(
    opened: OpenedModel, settings: Settings, device: Device, compute_dtype: str, plan: Plan
) -> dict[str, Any]:
    """What decides the answers beside policy and haystack."""
    return {
        "model": opened.model.name,
        "fingerprint": opened.model.fingerprint,
        "template": opened.template.fingerprint,
        "device": device,
        "compute_dtype": compute_dtype,
        "kv_dtype": settings.engine.kv_dtype,
        "theta": settings.engine.theta,
        "question_chunk_size": settings.engine.question_chunk_size,
        "selection": settings.selection.model_dump(),
        "document": digest_pieces(plan.document),
    }


def _path(
    request: EvalRequest, home: Home, settings: Settings, header: dict[str, Any]
) -> Path | None:
    if request.out is not None:
        if not request.out.parent.is_dir():
            raise UsageError("its directory does not exist", where=str(request.out))
        return request.out
    if not settings.store.enabled:
        return None
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode("ascii")).hexdigest()
    return private_dir(home.evals) / f"{digest[:16]}.jsonl"


def _differences(items: Sequence[ItemResult], choices: Sequence[PolicyChoice]) -> list[Difference]:
    """Each further policy against the first."""
    by_policy = {
        choice.label: [item for item in items if item.policy == choice.label] for choice in choices
    }
    first, *others = by_policy
    found = []
    for label in others:
        paired = paired_difference(by_policy[label], by_policy[first])
        if paired is not None:
            mean, low, high, n = paired
            found.append(Difference(policy=label, other=first, mean=mean, low=low, high=high, n=n))
    return found
