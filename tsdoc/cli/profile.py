"""`tsdoc profile`: where the time goes, as a table, JSON and a page."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tsdoc.cli.command import command
from tsdoc.cli.options import Engine, Model, Reading, Tuning
from tsdoc.cli.run import Run

if TYPE_CHECKING:
    from tsdoc.profile.request import ProfileRequest

PANEL = "Measuring"


class Sweepable(StrEnum):
    """What --sweep takes; Typer wants an enumeration for an option that can be repeated."""

    TOP_K = "top_k"
    THETA = "theta"
    CHUNK = "chunk"


Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SOURCE]...",
        help="What to read; without one, made-up text of --tokens.",
        show_default=False,
    ),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        metavar="N",
        min=64,
        help="Length of the prompt: a SOURCE is repeated or cut. Without either, 8,192.",
        show_default=False,
    ),
]
RandomWeights = Annotated[
    bool,
    typer.Option(
        "--random-weights",
        help="The shape of the profile's model with random weights: nothing is downloaded.",
    ),
]
Compare = Annotated[
    Literal["full"] | None,
    typer.Option("--compare", help="Full attention beside it.", show_default=False),
]
Sweep = Annotated[
    list[Sweepable] | None,
    typer.Option(
        "--sweep",
        metavar="OPTION",
        help="Try several values of top_k, theta or chunk. May be repeated.",
        show_default=False,
    ),
]
Html = Annotated[
    str | None,
    typer.Option(
        "--html", metavar="FILE", help="Also write a page with charts.", show_default=False
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Registers profile."""
    command(
        app,
        panel=PANEL,
        usage="[SOURCE]... [OPTIONS]",
        examples=[
            ("Where the time goes with this book", "tsdoc profile book.pdf"),
            ("Full attention beside it, as a page", "tsdoc profile --compare full --html p.html"),
            (
                "A large model's speed, without the model",
                "tsdoc profile --random-weights --profile qwen2-7b-instruct",
            ),
            ("What more selected tokens cost", "tsdoc profile book.pdf --sweep top_k"),
        ],
    )(profile)


def profile(
    run: Run,
    sources: Sources = None,
    tokens: Tokens = None,
    random_weights: RandomWeights = False,
    compare: Compare = None,
    sweep: Sweep = None,
    html: Html = None,
    *,
    reading: Reading,
    tuning: Tuning,
    model: Model,
    engine: Engine,
) -> None:
    """Measure where the time goes: stages, prefill, decode, the store, each kind of work.

    K and V go to a store of their own, which is removed at the end.
    Other work on the machine distorts what is measured.
    """
    from tsdoc.cli.profile_tables import show_report
    from tsdoc.profile.output import report_json
    from tsdoc.report import check_target

    settings = run.settings(tuning, model=model, engine=engine).settings
    target = None if html is None else Path(html)
    if target is not None:
        check_target(target)
    request = _request(
        run,
        sources=tuple(sources or ()),
        tokens=tokens,
        random_weights=random_weights,
        compare_full=compare == "full",
        sweeps=tuple(dict.fromkeys(value.value for value in sweep or ())),
        reading=reading,
        offline=model.offline,
    )
    report = run.services.profile(
        request, settings=settings, home=run.services.home(), reporter=run.reporter
    )
    if target is not None:
        from tsdoc.profile.page import profile_page

        run.write_page(target, profile_page(report))
    if run.output.json:
        run.answer(report_json(report))
    else:
        show_report(run.terminal, report)


def _request(
    run: Run,
    *,
    sources: tuple[str, ...],
    tokens: int | None,
    random_weights: bool,
    compare_full: bool,
    sweeps: tuple[Literal["top_k", "theta", "chunk"], ...],
    reading: Reading,
    offline: bool,
) -> ProfileRequest:
    import time

    import psutil

    from tsdoc.profile.request import ProfileRequest

    return ProfileRequest(
        sources=sources,
        ingest=run.ingest_options(reading),
        num_tokens=tokens,
        random_weights=random_weights,
        compare_full=compare_full,
        sweeps=sweeps,
        offline=offline,
        command=shlex.join(["tsdoc", *sys.argv[1:]]),
        start_up_s=max(0.0, time.time() - psutil.Process().create_time()),
    )
