"""`tsdoc eval`: how far the model can be trusted, by length, task and policy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tsdoc.cli.command import command
from tsdoc.cli.options import Engine, Model, Reading, Tuning
from tsdoc.cli.run import Run
from tsdoc.errors import UsageError

if TYPE_CHECKING:
    from tsdoc.eval.background import Kind
    from tsdoc.eval.request import EvalReport

SCALES = {"": 1, "k": 1024, "m": 1 << 20}


def _option(flag: str, metavar: str, text: str, **more: Any) -> Any:
    """An option that has no default to show."""
    return typer.Option(flag, metavar=metavar, help=text, show_default=False, **more)


Tasks = Annotated[
    str | None,
    _option("--tasks", "NAMES", "Tasks, separated by commas; --list names them."),
]
Lengths = Annotated[
    str | None,
    _option(
        "--lengths", "LENGTHS", "Tokens of each prompt: 8k,32k or 1M; all is the whole source."
    ),
]
Policies = Annotated[
    list[str] | None,
    _option(
        "--policy",
        "POLICY",
        "What a token attends to: a name or NAME:KEY=VALUE,…; may be repeated. The first is "
        "what others are compared with. --list names them.",
    ),
]
SourceOptions = Annotated[
    list[str] | None,
    _option(
        "--source", "SOURCE", "Hide facts in this document, not in made-up text; may be repeated."
    ),
]
Data = Annotated[
    list[Path] | None,
    _option(
        "--data", "FILE", "A JSONL file of InfiniteBench, RULER or LongBench; may be repeated."
    ),
]
NumItems = Annotated[
    int | None,
    _option("--items", "N", "Questions for each task and length.", min=1),
]
NumHaystacks = Annotated[
    int | None,
    _option("--haystacks", "N", "Texts that they share, at most: each is prefilled once.", min=1),
]
Backgrounds = Annotated[
    str | None,
    _option(
        "--haystack",
        "KINDS",
        "What the texts are made of: noise, filler or document; several take turns.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Other seeds are other items.")]
Out = Annotated[
    Path | None,
    _option("--out", "FILE", "Keep results there; the same command goes on with them."),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a page with heat maps too."),
]
FidelityOption = Annotated[
    bool,
    typer.Option(
        "--fidelity", help="Compare policies with full attention token by token; no tasks."
    ),
]
ListAll = Annotated[bool, typer.Option("--list", help="Name all tasks and policies.")]


def add_commands(app: typer.Typer) -> None:
    """Registers eval."""
    command(
        app,
        panel="Measuring",
        name="eval",
        usage="[OPTIONS]",
        examples=[
            ("Can it find facts in my book?", "tsdoc eval --source book.txt"),
            (
                "Against full attention, where that fits",
                "tsdoc eval --policy tokenselect --policy full",
            ),
            ("A larger budget", "tsdoc eval --policy tokenselect:top_k=4096"),
        ],
    )(evaluate)


def evaluate(
    run: Run,
    *,
    tasks: Tasks = None,
    lengths: Lengths = None,
    policies: Policies = None,
    sources: SourceOptions = None,
    data: Data = None,
    items: NumItems = None,
    haystacks: NumHaystacks = None,
    backgrounds: Backgrounds = None,
    seed: Seed = 0,
    out: Out = None,
    html: Html = None,
    fidelity: FidelityOption = False,
    list_all: ListAll = False,
    reading: Reading,
    tuning: Tuning,
    model: Model,
    engine: Engine,
) -> None:
    """Measure how far this model can be trusted, by length of the text.

    Facts are hidden in long texts and asked for. Without options that takes some minutes.
    """
    from tsdoc.eval.request import EvalRequest
    from tsdoc.report import check_target

    if list_all:
        _list(run)
        return
    if fidelity:
        _refuse_with_fidelity({"tasks": tasks, "data": data, "items": items, "out": out})
    if html is not None:
        check_target(html)
    request = EvalRequest(
        tasks=None if tasks is None else _names(tasks, "--tasks"),
        lengths=None if lengths is None else parse_lengths(lengths),
        policies=tuple(dict.fromkeys(policies or ["tokenselect"])),
        items=items,
        haystacks=haystacks,
        seed=seed,
        backgrounds=() if backgrounds is None else _kinds(backgrounds),
        sources=tuple(sources or ()),
        files=tuple(data or ()),
        fidelity=fidelity,
        out=out,
    )
    settings = run.settings(tuning, model=model, engine=engine).settings
    report = run.services.evaluate(
        request,
        settings=settings,
        home=run.services.home(),
        ingest=run.ingest_options(reading),
        reporter=run.reporter,
        offline=model.offline,
        on_kept=partial(_keep_in_mind, run),
    )
    if html is not None:
        _write_html(run, html, report)
    if run.output.json:
        from tsdoc.eval.show import report_json

        run.answer(report_json(report))
        return
    _show(run, report)


def _keep_in_mind(run: Run, kept: int, total: int) -> None:
    """Lets a Ctrl-C say what is kept."""
    run.kept = f"{kept:,} of {total:,} answers" if kept else "no answers"


def _refuse_with_fidelity(options: Mapping[str, object]) -> None:
    """Refuses options of tasks, which would be passed over.

    Raises:
        UsageError: one was given.
    """
    for name, value in options.items():
        if value is not None:
            raise UsageError(
                f"--{name} goes with tasks, and --fidelity has none",
                hint="Leave one of them out.",
            )


def parse_lengths(text: str) -> tuple[int, ...]:
    """Reads "8k,32k,1M,all".

    Raises:
        UsageError: a part is no length, or there is none.
    """
    from tsdoc.eval.request import WHOLE

    lengths = []
    for part in _names(text, "--lengths"):
        if part.lower() == "all":
            lengths.append(WHOLE)
            continue
        match = re.fullmatch(r"(\d+)([km]?)", part.lower())
        if match is None or int(match[1]) == 0:
            raise UsageError(
                f"{part} is no length", where="--lengths", hint="Say --lengths 8k,32k or 1M."
            )
        lengths.append(int(match[1]) * SCALES[match[2]])
    return tuple(lengths)


def _kinds(text: str) -> tuple[Kind, ...]:
    from tsdoc.eval.background import KINDS

    names = _names(text, "--haystack")
    kinds = tuple(kind for name in names for kind in KINDS if kind == name)
    if len(kinds) < len(names):
        raise UsageError(
            f"{text} names no kind of text",
            where="--haystack",
            hint=f"Kinds: {', '.join(KINDS)}.",
        )
    return kinds


def _names(text: str, option: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise UsageError("names nothing", where=f"{option} {text}".rstrip())
    return names


def _list(run: Run) -> None:
    from tsdoc.cli.tables import Column
    from tsdoc.eval.policies import POLICIES
    from tsdoc.eval.tasks import TASKS

    if run.output.json:
        run.answer(
            {
                "tasks": [{"name": task.name, "about": task.about} for task in TASKS.values()],
                "policies": [{"name": p.name, "about": p.about} for p in POLICIES.values()],
            }
        )
        return
    about = Column(title="", shrinks=True)
    run.terminal.table(
        [Column(title="task"), about], [(task.name, task.about) for task in TASKS.values()]
    )
    run.terminal.line()
    run.terminal.table(
        [Column(title="policy"), about], [(p.name, p.about) for p in POLICIES.values()]
    )


def _show(run: Run, report: EvalReport) -> None:
    from tsdoc.cli.tables import Column
    from tsdoc.eval.show import difference_line, fidelity_rows, summary_lines, table_rows

    if report.fidelity:
        titles = ("length", "tokens", "KL", "KL 95 %", "same", "95 %", "perpl.", "full", "recall")
        run.terminal.table(
            [Column(title="policy", shrinks=True), *(Column(title=t, right=True) for t in titles)],
            fidelity_rows(report),
        )
        return
    columns = [
        Column(title="task", shrinks=True),
        Column(title="length", right=True),
        Column(title="policy", shrinks=True),
        Column(title="score", right=True),
        Column(title="95 %", right=True),
        Column(title="n", right=True),
        Column(title="prefill", right=True),
        Column(title="first", right=True),
        Column(title="token", right=True),
    ]
    run.terminal.table(columns, table_rows(report))
    run.terminal.line()
    for line in summary_lines(report):
        run.terminal.line(line)
    for difference in report.differences:
        run.terminal.line(difference_line(difference))
    if report.path is not None:
        run.reporter.note(f"results: {report.path}")


def _write_html(run: Run, path: Path, report: EvalReport) -> None:
    from tsdoc.eval.show import heat_maps, report_json
    from tsdoc.report import render_page

    page = render_page(
        "eval",
        title=f"How far {report.model} can be trusted",
        data=report_json(report),
        maps=heat_maps(report),
    )
    run.write_page(path, page)
