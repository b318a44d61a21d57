"""What ask, summarize and ingest have in common: opening a session, showing and listing answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from tsdoc.cli.evidence import WantedPassages, evidence_json, show_evidence
from tsdoc.cli.options import Reading
from tsdoc.cli.run import Run

if TYPE_CHECKING:
    from tsdoc.ingest.document import Document
    from tsdoc.session import Answer, Conversation, Prepared, Session
    from tsdoc.settings import Settings

LONG_PREFILL_S = 60.0  # worth saying that the next question does not take as long
START_UP_S = 4.0  # a new process: imports, tokenizer


@contextmanager
def open_sources(
    run: Run, *, settings: Settings, sources: Sequence[str], reading: Reading, offline: bool
) -> Iterator[Session]:
    """Opens a session and says what should be known before its first answer."""
    ingest = run.ingest_options(reading)
    run.keeps = settings.store.enabled
    with run.services.open_session(
        settings=settings,
        home=run.services.home(),
        sources=sources,
        ingest=ingest,
        reporter=run.reporter,
        offline=offline,
    ) as session:
        model, estimate = session.model, session.estimate()
        if estimate.reused_tokens == 0:
            if model.note and estimate.prefill_s is None:  # this machine has not used it yet
                run.reporter.note(model.note)
            if model.small:  # said once for a source
                small = f"{model.name} is a small model: check its answers against the pages"
                run.reporter.note(small)
        yield session


def answer_all(
    run: Run, session: Session, questions: Sequence[str], *, wanted: WantedPassages
) -> list[Answer]:
    """Asks every question and streams its answer to stdout, unless JSON was asked for.

    Of several, each stands below its question on a terminal; elsewhere the answers alone are
    written, with an empty line between them.

    Args:
        run: The command.
        session: On the sources.
        questions: One or more.
        wanted: Passages to look for.
    """
    answers: list[Answer] = []
    for number, question in enumerate(questions):
        which = name_answer(number) if len(questions) > 1 else ""
        if not run.output.json:
            _separate(run, question, number, len(questions))
        answer = _ask(run, session, question, keep_queries=wanted.count > 0)
        if not run.output.json:
            run.terminal.line()
            run.terminal.flush()
        if wanted.count:
            answer = look(run, session, answer, count=wanted.count)
            if answer.evidence is not None:
                show_evidence(run, answer.evidence, which, listed=wanted.listed)
        answers.append(answer)
        read_s = session.prepare().times_s.get("prefill") if number == 0 else None
        report(run, answer, which, read_s=read_s)
    if session.prepare().times_s.get("prefill", 0.0) > LONG_PREFILL_S:
        start_s = START_UP_S + answers[-1].times_s["first_token"]
        run.reporter.note(f"next questions on this document take about {start_s:.0f} s to start")
    return answers


def _ask(run: Run, session: Session, question: str, *, keep_queries: bool) -> Answer:
    """Asks one question; how far the answer is shows where it cannot be seen itself."""
    streams, terminal = not run.output.json, run.terminal
    seen = streams and (terminal.answers_on_screen or terminal.answers_beside_notes)
    num_pieces = 0

    def show(text: str) -> None:
        nonlocal num_pieces
        num_pieces += 1
        if num_pieces == 1:
            run.reporter.finish()
            if not seen:
                run.reporter.start("answering", None, "tokens")
        if not seen:
            run.reporter.advance(num_pieces)  # a piece is a token, as a rule
        if streams:
            terminal.stream(text)

    run.reporter.start("answering", None, "tokens")
    answer = session.ask(question, show, keep_queries=keep_queries)
    run.reporter.finish()
    return answer


def name_answer(number: int) -> str:
    """Says which of several answers a warning is about; `number` counts from 0."""
    return f"answer {number + 1}"


def look(run: Run, answered: Session | Conversation, answer: Answer, *, count: int) -> Answer:
    """Finds the passages that the model looked at for its last answer."""
    run.reporter.start("looking where the answer comes from", None, "layers")
    answer = answered.find_evidence(answer, count=count)
    run.reporter.finish()
    return answer


def _separate(run: Run, question: str, number: int, count: int) -> None:
    if number > 0:
        run.terminal.line()
    if count > 1 and run.terminal.answers_on_screen:
        run.terminal.stream(f"> {question}\n\n")


def report(run: Run, answer: Answer, which: str, *, read_s: float | None) -> None:
    """Says on stderr what an answer cost, and whether it was cut.

    Args:
        run: The command.
        answer: What was answered.
        which: Says which answer, where there are several.
        read_s: Seconds of reading the document, where that came before it.
    """
    run.reporter.gap()
    say_ended(run, answer, which)
    seconds = sum(answer.times_s.values())
    read = f"read in {read_s:.1f} s, " if read_s else ""
    again = f", {answer.reread_tokens:,} read again" if answer.reread_tokens else ""
    run.reporter.note(
        f"{answer.prompt_tokens:,} prompt tokens, {answer.reused_tokens:,} of them reused{again}; "
        f"{answer.generated_tokens:,} generated; {read}answered in {seconds:.1f} s"
    )


def say_ended(run: Run, answer: Answer, which: str = "") -> None:
    """Warns of an answer that the model did not end itself."""
    if answer.finish_reason == "length":
        run.reporter.warn(
            "answer_cut",
            which,
            f"the answer was cut after {answer.generated_tokens:,} tokens; "
            "--max-new-tokens allows more",
            again=True,
        )
    elif answer.finish_reason == "loop":
        run.reporter.warn(
            "answer_looped",
            which,
            "the model said the same over and over, and the answer was ended; "
            "`--set stop_loops=false` lets it go on",
            again=True,
        )


def session_json(session: Session, answers: Sequence[Answer]) -> dict[str, object]:
    """Returns the part of the JSON object that ask, chat and summarize share."""
    prompt = prompt_json(session, session.prepare())
    return {**prompt, "answers": [answer_json(answer) for answer in answers]}


def prompt_json(session: Session, prepared: Prepared) -> dict[str, object]:
    """Returns the part that ingest has too: what was read, and with which model."""
    return {
        "model": model_json(session),
        "document": document_json(session.document),
        "prompt_tokens": prepared.prompt_tokens,
        "reused_tokens": prepared.reused_tokens,
        "computed_tokens": prepared.computed_tokens,
        "kept": prepared.kept,
        "entry": prepared.entry_id,
        **_prefill_json(prepared),
        "times_s": dict(prepared.times_s),
    }


def _prefill_json(prepared: Prepared) -> dict[str, object]:
    """Returns what the prefill was expected to take, and what it took."""
    outcome = prepared.outcome
    return {
        "estimate": asdict(prepared.estimate),
        "outcome": asdict(outcome) if outcome is not None else None,
    }


def model_json(session: Session) -> dict[str, object]:
    """Returns which model answered."""
    model = session.model
    return {"name": model.name, "licence": model.licence, "small": model.small}


def document_json(document: Document) -> dict[str, object]:
    """Returns what was read."""
    return {
        "name": document.name,
        "files": [
            {
                "name": file.name,
                "path": None if file.path is None else str(file.path),
                "kind": file.kind,
                "bytes": file.num_bytes,
                "sha256": file.sha256,
            }
            for file in document.files
        ],
        "skipped": [
            {"name": file.name, "reason": file.reason, "bytes": file.num_bytes}
            for file in document.skipped
        ],
    }


def answer_json(answer: Answer) -> dict[str, object]:
    """Returns one answer."""
    return {
        "question": answer.question,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "reused_tokens": answer.reused_tokens,
        "reread_tokens": answer.reread_tokens,
        "generated_tokens": answer.generated_tokens,
        "selection_cache": {"steps": answer.selection_steps, "hits": answer.selection_hits},
        "times_s": dict(answer.times_s),
        "evidence": None if answer.evidence is None else evidence_json(answer.evidence),
    }
