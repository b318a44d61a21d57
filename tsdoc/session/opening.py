"""The way to a session: locate the model, read the sources or their record, lay out the prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tsdoc.errors import PartialInputError, StoreError
from tsdoc.home import Home
from tsdoc.ingest.document import Document
from tsdoc.ingest.options import IngestOptions
from tsdoc.models.locate import locate_model
from tsdoc.progress import Reporter
from tsdoc.prompt.assemble import Prompt, build_prompt
from tsdoc.prompt.chat import ChatTemplate, load_template
from tsdoc.prompt.record import load_record, record_key, save_record
from tsdoc.prompt.tokenizer import TextTokenizer
from tsdoc.session.limits import check_length
from tsdoc.session.session import Session
from tsdoc.settings import Settings


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
    begun = time.perf_counter()
    model = locate_model(
        settings.model,
        home,
        offline=offline,
        confirm=lambda plan: reporter.confirm(plan.question),
        on_progress=_stages(reporter, "bytes"),
    )
    for sentence in (model.announcement, model.note):
        if sentence:
            reporter.note(sentence)
    tokenizer = TextTokenizer(model.directory)
    template = load_template(model.directory, tokenizer, home=home)
    for sentence in template.warnings:
        reporter.warn("template", model.name, sentence)
    times["model_locate"] = time.perf_counter() - begun
    document, prompt = _read(settings, home, sources, ingest, reporter, tokenizer, template, times)
    for warning in document.warnings:
        reporter.warn(warning.code, warning.where, warning.message)
    if ingest.strict and document.warnings:
        first = document.warnings[0]
        raise PartialInputError(
            f"{first.message} ({len(document.warnings)} warnings in all)", where=first.where
        )
    check_length(len(prompt.ids), settings.prompt.max_prompt_tokens, prompt)
    return Session(
        settings=settings,
        home=home,
        reporter=reporter,
        model=model,
        tokenizer=tokenizer,
        template=template,
        document=document,
        prompt=prompt,
        warnings=list(document.warnings),
        times_s=times,
    )


def _read(
    settings: Settings,
    home: Home,
    sources: Sequence[str],
    ingest: IngestOptions,
    reporter: Reporter,
    tokenizer: TextTokenizer,
    template: ChatTemplate,
    times: dict[str, float],
) -> tuple[Document, Prompt]:
    """The document and its prompt, from the source record where nothing has changed."""
    from tsdoc.ingest.sources import fingerprint_sources, read_sources

    begun = time.perf_counter()
    tree_tokens = settings.prompt.tree_tokens
    fingerprint = fingerprint_sources(sources, ingest)
    key = record_key(fingerprint.digest, tokenizer, template, tree_tokens=tree_tokens)
    times["hash_sources"] = time.perf_counter() - begun
    record = load_record(home, key) if settings.store.enabled else None
    if record is not None:
        return record.document, record.prompt
    begun = time.perf_counter()
    document = read_sources(sources, ingest, _stages(reporter, "bytes", "reading "))
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
    # A file that changed while it was read must not be found under its old fingerprint.
    unchanged = fingerprint_sources(sources, ingest).digest == fingerprint.digest
    if settings.store.enabled and unchanged:
        try:
            save_record(home, key, document, prompt)
        except StoreError as error:
            message = f"{error.message}; next time the sources are read again"
            reporter.warn("not_kept", error.where or "", message)
    return document, prompt


def _stages(reporter: Reporter, unit: str, verb: str = "") -> Callable[[str, int, int], None]:
    """Adapts a (stage, done, total) callback to the reporter."""
    current: list[str] = []

    def report(stage: str, done: int, total: int) -> None:
        if current != [stage]:
            current[:] = [stage]
            reporter.start(verb + stage, total, unit)
        reporter.advance(done)

    return report
