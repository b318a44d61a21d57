"""The `tsdoc` command: its tree of commands, and the edge at which every error ends."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from tsdoc import __version__
from tsdoc.cli import (
    ask,
    cache,
    chat,
    evaluating,
    models,
    profile,
    settings,
    sources,
    summarize,
)
from tsdoc.cli.command import PlainGroup
from tsdoc.cli.console import standard_terminal
from tsdoc.cli.edge import run_command
from tsdoc.cli.interrupt import Interrupts
from tsdoc.cli.services import Services

EPILOG = """Examples

A question about a book, then another one; the second takes seconds:
  tsdoc ask book.pdf "Who inherits the house?"
  tsdoc ask book.pdf "And who objects?"
How long a repository is, before asking:
  tsdoc tokens .

Exit codes

    0  done, maybe with warnings
    1  internal error
    2  usage, setting or profile
    3  input
    4  model
    5  store
    6  memory, disk or length
    7  part of the input failed under --strict
  130  interrupted"""


def build_app() -> typer.Typer:
    """Returns the Typer application with every command."""
    app = typer.Typer(
        name="tsdoc",
        cls=PlainGroup,
        help="Ask questions of whole books, repositories and PDFs.",
        epilog=EPILOG,
        no_args_is_help=True,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_global_options)
    ask.add_commands(app)
    chat.add_commands(app)
    summarize.add_commands(app)
    sources.add_commands(app)
    profile.add_commands(app)
    cache.add_commands(app)
    models.add_commands(app)
    evaluating.add_commands(app)
    settings.add_commands(app)
    return app


def main(argv: Sequence[str] | None = None, *, services: Services | None = None) -> None:
    """Runs the command line and exits with its code."""
    app = build_app()
    if "_TSDOC_COMPLETE" in os.environ:
        app(prog_name="tsdoc")  # answers the shell and exits
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of libraries, about themselves
    terminal = standard_terminal()
    with Interrupts(terminal) as interrupts:
        status = run_command(
            app,
            list(sys.argv[1:] if argv is None else argv),
            terminal=terminal,
            services=services or Services(),
            interrupts=interrupts,
        )
    sys.exit(status)


def _show_version(context: typer.Context, value: bool) -> None:
    if value:
        context.obj.terminal.line(f"tsdoc {__version__}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options of `tsdoc` itself."""
