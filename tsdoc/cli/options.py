"""Options that several commands share, in groups.

Each group is a dataclass whose fields are Typer parameters; `tsdoc.cli.command` spreads the groups
a command asks for into its parameters. Annotations are evaluated here, hence no future import.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import typer

from tsdoc.cli import completion

READING = "Reading"
SETTINGS = "Model and settings"
ANSWERING = "Answering"
OUTPUT = "Output"

Sources = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SOURCE...",
        help="Files, directories, or - for standard input.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """How the result is shown; every command has these."""

    json: Annotated[
        bool,
        typer.Option("--json", help="One JSON object on stdout.", rich_help_panel=OUTPUT),
    ] = False
    quiet: Annotated[
        bool,
        typer.Option("--quiet", help="No progress and no notes on stderr.", rich_help_panel=OUTPUT),
    ] = False
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=OUTPUT),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Which part of the sources is read, and how."""

    pages: Annotated[
        str | None,
        typer.Option(
            "--pages",
            metavar="RANGES",
            help="Only these document pages: 100-180, or 1,5-9,20-.",
            rich_help_panel=READING,
        ),
    ] = None
    section: Annotated[
        str | None,
        typer.Option(
            "--section",
            metavar="TITLE",
            help="Only the sections under this heading.",
            rich_help_panel=READING,
        ),
    ] = None
    include: Annotated[
        list[str],
        typer.Option(
            "--include",
            metavar="GLOB",
            help="Only files that match; may be repeated.",
            show_default=False,
            rich_help_panel=READING,
        ),
    ] = field(default_factory=list)
    exclude: Annotated[
        list[str],
        typer.Option(
            "--exclude",
            metavar="GLOB",
            help="Not the files that match; may be repeated.",
            show_default=False,
            rich_help_panel=READING,
        ),
    ] = field(default_factory=list)
    password_file: Annotated[
        str | None,
        typer.Option(
            "--password-file",
            metavar="FILE",
            help="Password of encrypted documents: the first line of FILE. The environment "
            "variable TSDOC_PASSWORD does as well.",
            rich_help_panel=READING,
        ),
    ] = None
    password: Annotated[
        str | None,
        typer.Option(
            "--password",
            metavar="TEXT",
            help="The password itself; other users can see it in the list of processes.",
            rich_help_panel=READING,
        ),
    ] = None
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Stop (exit code 7) when a part of the input cannot be read.",
            rich_help_panel=READING,
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Settings by profile and by key."""

    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="NAME|FILE",
            autocompletion=completion.profiles,
            help="Settings of a profile; `tsdoc profiles list` names them.",
            rich_help_panel=SETTINGS,
        ),
    ] = None
    assignments: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            autocompletion=completion.settings,
            help="Any setting; `tsdoc config show` lists them. May be repeated.",
            show_default=False,
            rich_help_panel=SETTINGS,
        ),
    ] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Which model is used, and whether it may be fetched."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="SOURCE",
            help="default, hf:ORG/NAME, a model directory or a .gguf file.",
            rich_help_panel=SETTINGS,
        ),
    ] = None
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Download nothing; fail instead.", rich_help_panel=SETTINGS),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Where a prefill runs and whether it is kept."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"] | None,
        typer.Option("--device", help="Where the model runs.", rich_help_panel=SETTINGS),
    ] = None
    no_store: Annotated[
        bool,
        typer.Option(
            "--no-store",
            help="Keep nothing on disk: neither the text nor its KV pages.",
            rich_help_panel=SETTINGS,
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines(Engine):
    """The same for commands that several processes can compute together."""

    parallel: Annotated[
        int | None,
        typer.Option(
            "--parallel",
            metavar="N",
            min=1,
            help="Split the model over N processes that compute together.",
            rich_help_panel=SETTINGS,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an answer is generated."""

    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            min=1,
            help="Cut an answer after N tokens.",
            rich_help_panel=ANSWERING,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            min=0.0,
            help="0 always takes the likeliest token.",
            rich_help_panel=ANSWERING,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            metavar="P",
            help="Sample among the likeliest tokens that hold P of the probability: above 0, up to "
            "1.",
            rich_help_panel=ANSWERING,
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            help="Seed of the sampling; the same seed gives the same answer.",
            rich_help_panel=ANSWERING,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explaining:
    """What is said of where an answer came from."""

    evidence: Annotated[
        int | None,
        typer.Option(
            "--evidence",
            metavar="N",
            min=0,
            max=50,
            help="Name up to N passages that the model looked at, 3 unless stdout is a pipe; "
            "0 names none.",
            rich_help_panel=ANSWERING,
        ),
    ] = None
    html: Annotated[
        str | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write answers and passages as a page with the document as a strip.",
            rich_help_panel=ANSWERING,
        ),
    ] = None
