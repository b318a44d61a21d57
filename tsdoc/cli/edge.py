"""The edge of the command line: every exception becomes an exit code and one line (or JSON)."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import typer
from typer.exceptions import TyperException

from tsdoc.cli.console import ClosedPipeError, Terminal
from tsdoc.cli.interrupt import Interrupts
from tsdoc.cli.options import Output
from tsdoc.cli.run import Run
from tsdoc.cli.services import Services
from tsdoc.errors import ResourceError, TsdocError, UsageError

NO_MEMORY = "Cannot allocate memory"  # as torch says it, which raises a RuntimeError
CLOSED_PIPE = 141  # what a shell reports for a program that SIGPIPE ended


def run_command(
    app: typer.Typer,
    args: Sequence[str],
    *,
    terminal: Terminal,
    services: Services,
    interrupts: Interrupts | None = None,
) -> int:
    """Runs one command line and returns its exit code; raises nothing."""
    run = Run(terminal=terminal, services=services, output=_raw_output(args), interrupts=interrupts)
    try:
        error = _invoke(app, args, run)
        if isinstance(error, int):
            return error
        run.fail(error)
        return error.exit_code if isinstance(error, TsdocError) else 1
    except ClosedPipeError:
        run.reporter.finish()
        return CLOSED_PIPE


def _invoke(app: typer.Typer, args: Sequence[str], run: Run) -> int | BaseException:
    """Returns the exit code, or the error that ended the command."""
    command = typer.main.get_command(app)
    try:
        with command.make_context("tsdoc", list(args), obj=run) as context:
            command.invoke(context)
        run.terminal.flush()
        return 0
    except typer.Exit as done:
        run.terminal.flush()
        return done.exit_code
    except SystemExit as done:
        # Raised by Rich when the help text's reader has gone (1), and by shell completion (0).
        return CLOSED_PIPE if done.code == 1 else 0
    except ClosedPipeError:
        raise
    except BrokenPipeError as error:
        # Of what Typer prints itself: tsdoc's own output and pipes name theirs.
        run.terminal.flush()
        raise ClosedPipeError from error
    except KeyboardInterrupt:
        return run.interrupted()
    except TsdocError as error:
        return error
    except TyperException as error:
        return _usage_error(error, run)
    except Exception as error:  # noqa: BLE001 - the last edge: a bug is one line, not a traceback
        if run.interrupts.came:
            # Libraries make other errors of a KeyboardInterrupt: safetensors a ValueError.
            stopped = run.interrupted()
            stopped.__cause__ = error
            return stopped
        return _shortage(error) or error


def _shortage(error: Exception) -> ResourceError | None:
    """What the machine, or a limit of this process, has too little of."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        short = ResourceError("too many open files", hint="Raise `ulimit -n`.")
    elif isinstance(error, MemoryError) or number == errno.ENOMEM or NO_MEMORY in str(error):
        hint = "Narrow the sources with --pages or --exclude."
        short = ResourceError("out of memory", hint=hint)
    else:
        return None
    short.__cause__ = error
    return short


def _usage_error(error: TyperException, run: Run) -> int | BaseException:
    """Maps what Typer says about the arguments; it has already shown help where it says nothing."""
    message = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    message = message.replace("Input should be", "must be")
    if not message:
        return error.exit_code
    context = getattr(error, "ctx", None)
    if context is not None:
        run.command = context.command_path
    mapped = UsageError(message, hint=f"`{run.command} --help` shows what it takes.")
    mapped.__cause__ = error
    return mapped


def _raw_output(args: Sequence[str]) -> Output:
    """Returns the output options as far as they can be told before the arguments are parsed."""
    options = list(args)[: list(args).index("--")] if "--" in args else args
    return Output(json="--json" in options, quiet="--quiet" in options, debug="--debug" in options)
