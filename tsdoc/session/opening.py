"""The way to a session: locate the model, read the sources or their record, lay out the prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tsdoc.errors import ResourceError, StoreError
from tsdoc.home import Home
from tsdoc.ingest.document import Document
from tsdoc.ingest.options import IngestOptions
from tsdoc.ingest.sources import (
    SourceFingerprint,
    check_complete,
    fingerprint_sources,
    read_sources,
)
from tsdoc.kernels.devices import device_bytes
from tsdoc.models.locate import LocatedModel, locate_model
from tsdoc.models.search import real_access
from tsdoc.progress import Reporter
from tsdoc.prompt.assemble import build_prompt
from tsdoc.prompt.chat import ChatTemplate, load_template
from tsdoc.prompt.record import SourceRecord, load_record, record_key, save_record
from tsdoc.prompt.tokenizer import TextTokenizer
from tsdoc.session.limits import check_length
from tsdoc.session.session import Session
from tsdoc.settings import Settings

ORDER_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model on this disk, its tokenizer and its chat template; no weights are loaded yet."""

    model: LocatedModel
    tokenizer: TextTokenizer
    template: ChatTemplate


def open_model(*, settings: Settings, home: Home, reporter: Reporter, offline: bool) -> OpenedModel:
    """Locates the model, and says so where `default` was decided by this call.

    Raises:
        ModelError: it cannot be had.
    """
    model = locate_model(
        settings.model,
        home,
        offline=offline,
        confirm=lambda plan: reporter.confirm(plan.question),
        on_progress=_stages(reporter),
        access=real_access(lambda: device_bytes(settings.engine.device)),
    )
    if model.announcement:
        reporter.note(model.announcement)
    tokenizer = TextTokenizer(model.directory)
    template = load_template(model.directory, tokenizer, home=home)
    for sentence in template.warnings:
        reporter.warn("template", model.name, sentence)
    return OpenedModel(model=model, tokenizer=tokenizer, template=template)


def open_session(
    *,
    settings: Settings,
    home: Home,
    sources: Sequence[str],
    ingest: IngestOptions,
    reporter: Reporter,
    offline: bool,
) -> Session:
    """Locates the model, reads the sources and lays out the prompt; nothing is prefilled yet.

    Raises:
        ModelError: the model cannot be had.
        InputError: a source cannot be read.
        PartialInputError: part of the input failed and `ingest.strict` is set.
        ResourceError: the prompt is longer than max_prompt_tokens.
    """
    times: dict[str, float] = {}
    # Sources first: a mistyped name should not cost a download.
    begun = time.perf_counter()
    fingerprint = fingerprint_sources(sources, ingest)
    times["hash_sources"] = time.perf_counter() - begun
    begun = time.perf_counter()
    opened = open_model(settings=settings, home=home, reporter=reporter, offline=offline)
    tokenizer, template = opened.tokenizer, opened.template
    times["model_locate"] = time.perf_counter() - begun
    tree_tokens = settings.prompt.tree_tokens
    key = record_key(fingerprint.digest, tokenizer, template, tree_tokens=tree_tokens)
    record = load_record(home, key) if settings.store.enabled else None
    if record is None:
        record = _read(sources, ingest, reporter, tokenizer, template, tree_tokens, times)
        # A file that changed while it was read must not be found under its old fingerprint.
        unchanged = fingerprint_sources(sources, ingest).digest == fingerprint.digest
        if settings.store.enabled and unchanged:
            _save(home, key, record, reporter)
    document, prompt = _locate_files(record.document, fingerprint), record.prompt
    _say_order(document, fingerprint.names, reporter)
    for warning in document.warnings:
        reporter.warn(warning.code, warning.where, warning.message)
    if ingest.strict:
        check_complete(document)
    check_length(len(prompt.ids), settings.prompt.max_prompt_tokens, prompt)
    return Session(
        settings=settings,
        home=home,
        reporter=reporter,
        model=opened.model,
        tokenizer=tokenizer,
        template=template,
        document=document,
        prompt=prompt,
        warnings=list(document.warnings),
        times_s=times,
        record=key,
        part=ingest.part,
    )


def _read(
    sources: Sequence[str],
    ingest: IngestOptions,
    reporter: Reporter,
    tokenizer: TextTokenizer,
    template: ChatTemplate,
    tree_tokens: int,
    times: dict[str, float],
) -> SourceRecord:
    """Reads and tokenises the sources."""
    begun = time.perf_counter()
    document = read_sources(sources, ingest, _stages(reporter, "reading "))
    reporter.finish()
    times["ingest"] = time.perf_counter() - begun
    begun = time.perf_counter()
    reporter.start("tokenise", sum(len(s.text) for s in document.sections), "characters")
    prompt = build_prompt(
        document,
        tokenizer,
        template,
        tree_tokens=tree_tokens,
        on_progress=lambda done, _: reporter.advance(done),
    )
    reporter.finish()
    times["tokenise"] = time.perf_counter() - begun
    return SourceRecord(document=document, prompt=prompt)


def _locate_files(document: Document, fingerprint: SourceFingerprint) -> Document:
    """Returns a document whose files lie where they do now; equal ones were read before, maybe."""
    paths = dict(zip(fingerprint.names, fingerprint.paths, strict=True))
    files = tuple(replace(file, path=paths.get(file.name)) for file in document.files)
    return replace(document, files=files)


def _say_order(document: Document, asked: Sequence[str], reporter: Reporter) -> None:
    """Says so when the sources were read before, in another order than they are named in now."""
    read = [file.name for file in document.files]
    if set(read) <= set(asked) and read != [name for name in asked if name in set(read)]:
        shown = ", ".join(read[:ORDER_SHOWN]) + (", …" if len(read) > ORDER_SHOWN else "")
        reporter.note(f"these sources were read before as {shown}; that order is kept")


def _save(home: Home, key: str, record: SourceRecord, reporter: Reporter) -> None:
    try:
        save_record(home, key, record.document, record.prompt)
    except (ResourceError, StoreError) as error:
        message = f"{error.message}; next time the sources are read again"
        reporter.warn("not_kept", error.where or "", message)


def _stages(reporter: Reporter, verb: str = "") -> Callable[[str, int, int], None]:
    """Adapts a (stage, bytes done, bytes in all) callback to the reporter."""
    current: list[str] = []

    def report(stage: str, done: int, total: int) -> None:
        if current != [stage]:
            current[:] = [stage]
            reporter.start(verb + stage, total, "bytes")
        reporter.advance(done)

    return report
