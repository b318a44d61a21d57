"""`tsdoc summarize`: a whole document, or its sections or files one by one, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tsdoc.cli.answering import open_sources, say_ended, session_json
from tsdoc.cli.arguments import require_sources
from tsdoc.cli.command import command
from tsdoc.cli.options import ANSWERING, Engines, Model, Reading, Sampling, Sources, Tuning
from tsdoc.cli.reporter import duration
from tsdoc.cli.run import Run
from tsdoc.errors import InterruptedRunError
from tsdoc.terminal import format_count, visible_line

if TYPE_CHECKING:
    from tsdoc.ingest.document import Place
    from tsdoc.session import Session
    from tsdoc.session.parts import Part
    from tsdoc.session.summary import CitedSentence, Summarizer, Summary

PANEL = "Questions"
LONG_RUN_S = 600.0  # more than this is asked about
COUNTED_AS = 3  # the summary of the summaries, in parts
SHORT_PART_S = 10.0  # below, tenths of a second are told

By = Annotated[
    Literal["whole", "section", "file"],
    typer.Option(
        "--by",
        help="What is summarised: the whole, or each section or file and then the whole. Short "
        "sections that follow one another are one part.",
        rich_help_panel=ANSWERING,
    ),
]
LengthOption = Annotated[
    Literal["short", "medium", "long"],
    typer.Option(
        "--length",
        help="About 100, 250 or 600 words, and for each part 40, 80 or 160.",
        rich_help_panel=ANSWERING,
    ),
]
Yes = Annotated[
    bool,
    typer.Option("--yes", help="Do not ask before a long run.", rich_help_panel=ANSWERING),
]


def add_commands(app: typer.Typer) -> None:
    """Registers summarize."""
    command(
        app,
        panel=PANEL,
        usage="SOURCE... [OPTIONS]",
        examples=[
            ("A summary of a whole book", "tsdoc summarize book.pdf"),
            ("Chapter by chapter", "tsdoc summarize book.epub --by section > book.md"),
            ("A longer one of some pages", "tsdoc summarize book.pdf --pages 1-60 --length long"),
        ],
    )(summarize)


def summarize(
    run: Run,
    sources: Sources = None,
    by: By = "whole",
    length: LengthOption = "medium",
    yes: Yes = False,
    *,
    reading: Reading,
    tuning: Tuning,
    model: Model,
    engine: Engines,
    sampling: Sampling,
) -> None:
    """Summarise the sources as Markdown, with the places that say the same.

    With --by, each part is summarised from its own text, and then the whole from these summaries.
    Finished parts are kept: after Ctrl-C the same command goes on.
    """
    require_sources(sources or [], command="summarize")
    resolved = run.settings(tuning, model=model, engine=engine, sampling=sampling)
    settings = resolved.settings
    chosen = resolved.origins["answer.max_new_tokens"] != "built-in"
    with open_sources(
        run, settings=settings, sources=sources or [], reading=reading, offline=model.offline
    ) as session:
        summarizer = run.services.open_summarizer(
            session,
            length=length,
            max_new_tokens=settings.answer.max_new_tokens if chosen else None,
        )
        if by == "whole":
            summary, parts = _whole(run, session, summarizer), []
        else:
            session.prepare()
            parts = _PartByPart(run, summarizer, yes=yes).run(
                run.services.split_document(session, by)
            )
            summary = _of_parts(run, session, summarizer, parts)
        if run.output.json:
            made = [*(s for _, s in parts), summary]
            run.answer(
                {
                    **session_json(session, [s.answer for s in made if s.answer is not None]),
                    "by": by,
                    "length": length,
                    "summary": _summary_json(summary),
                    "parts": [{**_part_json(part), **_summary_json(s)} for part, s in parts],
                }
            )


def _whole(run: Run, session: Session, summarizer: Summarizer) -> Summary:
    """Summarises in one pass and shows the sentences as they come."""
    writer = _Markdown(run)
    writer.heading(1, f"Summary of {session.document.name}")
    summary = summarizer.whole(writer.sentence)
    writer.end(summary)
    if summary.answer is not None:
        say_ended(run, summary.answer)
    return summary


class _PartByPart:
    """Summarises parts that no earlier run has summarised; says how long it will take."""

    def __init__(self, run: Run, summarizer: Summarizer, *, yes: bool) -> None:
        self._run = run
        self._summarizer = summarizer
        self._asked = yes

    def run(self, parts: Sequence[Part]) -> list[tuple[Part, Summary]]:
        """Returns the summaries in the order of the parts.

        Raises:
            InterruptedRunError: the answer to the question whether to go on was no.
        """
        found = [self._summarizer.kept_part(part) for part in parts]
        missing = [number for number, summary in enumerate(found) if summary is None]
        reporter = self._run.reporter
        if len(missing) < len(parts):
            reporter.note(f"{len(parts) - len(missing)} of {len(parts)} parts are kept from before")
        reporter.start("summarise", len(parts), "parts")
        reporter.advance(len(parts) - len(missing))
        for count, number in enumerate(missing, start=1):
            part = parts[number]
            made = self._summarizer.kept_part(part) or self._summarizer.part(part)
            found[number] = made
            done = len(parts) - len(missing) + count
            if self._summarizer.keeps:
                self._run.kept = f"{done} of {len(parts)} parts"
            if count == 1 and made.answer is not None:
                self._consent(sum(made.answer.times_s.values()), len(missing) - 1)
            reporter.advance(done)
        reporter.finish()
        return [(part, s) for part, s in zip(parts, found, strict=True) if s is not None]

    def _consent(self, part_s: float, num_left: int) -> None:
        """Says how long the rest will take, and asks before it takes very long.

        Args:
            part_s: Seconds that the first part took, without loading the model.
            num_left: Parts that are still to come.
        """
        # What is said is reckoned with, so that the sum is right.
        part_s = round(part_s, 1) if part_s < SHORT_PART_S else round(part_s)
        left_s = part_s * (num_left + COUNTED_AS)
        parts = format_count(num_left, "more part")
        each = f"{parts} at about {part_s:g} s" + (" each" if num_left > 1 else "")
        whole = f"about {duration(part_s * COUNTED_AS)} for the summary of them all"
        about = f"{each}, then {whole}: about {duration(left_s)}"
        if left_s < LONG_RUN_S or self._asked:
            if num_left:
                self._run.reporter.note(about)
        elif not self._run.reporter.confirm(f"{about}. Ctrl-C is safe. Go on?"):
            error = self._run.interrupted()
            raise InterruptedRunError(error.message)


def _of_parts(
    run: Run, session: Session, summarizer: Summarizer, parts: Sequence[tuple[Part, Summary]]
) -> Summary:
    """Summarises the summaries, shows the sentences as they come, and the parts below."""
    writer = _Markdown(run)
    writer.heading(1, f"Summary of {session.document.name}")
    run.reporter.start("summarise the summaries", None, "tokens")

    def show(sentence: CitedSentence) -> None:
        run.reporter.finish()
        writer.sentence(sentence)

    summary = summarizer.of_summaries(parts, show)
    run.reporter.finish()
    writer.end(summary)
    if not run.output.json:
        _show_parts(run, writer, summary, parts)
    if summary.answer is not None:
        say_ended(run, summary.answer)
    return summary


def _show_parts(
    run: Run, writer: _Markdown, summary: Summary, parts: Sequence[tuple[Part, Summary]]
) -> None:
    """Shows the parts below the summary of them all, without what was said twice by then."""
    from tsdoc.session.summary import without_repetitions

    shown = without_repetitions([summary, *(s for _, s in parts)])
    for (part, made), sentences in zip(parts, shown[1:], strict=True):
        run.terminal.line()
        writer.heading(2, f"{part.title} ({part.where})")
        for sentence in sentences:
            writer.sentence(sentence)
        writer.end(made, within=_part_text(part))


class _Markdown:
    """Writes headings and paragraphs of cited sentences to stdout."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._begun = False
        self._cited = False

    def heading(self, level: int, text: str) -> None:
        """Writes a heading and the empty line behind it."""
        if self._run.output.json:
            return
        self._run.terminal.stream(f"{'#' * level} {visible_line(text)}\n\n")

    def sentence(self, sentence: CitedSentence) -> None:
        """Writes a sentence and its place; one that has none says something by that."""
        if self._run.output.json:
            return
        from tsdoc.session.summary import separator

        cited = "" if sentence.place is None else f" [{_place_text(sentence.place)}]"
        before = separator(sentence.text) if self._begun else ""
        self._run.terminal.stream(f"{before}{sentence.text}{cited}")
        self._begun = True
        self._cited = self._cited or bool(cited)

    def end(self, summary: Summary, *, within: str | None = None) -> None:
        """Ends the paragraph; one without a place gets the nearest of its summary, or `within`."""
        if self._run.output.json:
            return
        if not self._begun:
            self._run.terminal.stream("(no summary: the model said nothing that could stand here)")
        closest = ""
        if not self._cited and summary.nearest is not None:
            closest = f" [nearest: {_place_text(summary.nearest)}]"
        elif not self._cited and within is not None:
            closest = f" [somewhere in {within}]"
        self._run.terminal.stream(closest)
        self._run.terminal.line()
        self._run.terminal.flush()
        self._begun = False
        self._cited = False


def _place_text(place: Place) -> str:
    """Returns page or line; the headings where a format has neither."""
    titles = () if _has_number(place) else place.titles
    return visible_line(" › ".join([str(place), *titles]))


def _part_text(part: Part) -> str:
    """Returns a part's pages or lines; its title where a format has neither."""
    titled = not _has_number(part.first) and part.title != part.first.file
    return visible_line(f"{part.where} › {part.title}" if titled else part.where)


def _has_number(place: Place) -> bool:
    return (place.page, place.cell, place.line) != (None, None, None)


def _part_json(part: Part) -> dict[str, object]:
    return {
        "title": part.title,
        "sections": [{"titles": list(titles)} for titles in part.headings],
        "where": part.where,
        "first": asdict(part.first),
        "last": asdict(part.last),
        "tokens": list(part.tokens),
    }


def _summary_json(summary: Summary) -> dict[str, object]:
    return {
        "text": summary.text,
        "finish_reason": summary.finish_reason,
        "generated_tokens": summary.generated_tokens,
        "kept": summary.answer is None,
        "nearest": None if summary.nearest is None else asdict(summary.nearest),
        "sentences": [
            {"text": s.text, "place": None if s.place is None else asdict(s.place)}
            for s in summary.sentences
        ],
    }
