"""One run of a command: where it prints, what it asks of the library, what it was told."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tsdoc.cli.arguments import find_password, parse_pages
from tsdoc.cli.console import Terminal
from tsdoc.cli.interrupt import Interrupts
from tsdoc.cli.options import Engine, Engines, Explaining, Model, Output, Reading, Sampling, Tuning
from tsdoc.cli.reporter import ConsoleReporter
from tsdoc.cli.services import Services
from tsdoc.errors import InterruptedRunError, ResourceError, TsdocError

if TYPE_CHECKING:
    from tsdoc.config import Layer, ResolvedSettings
    from tsdoc.ingest.options import IngestOptions

EVIDENCE = "--evidence"


class Run:
    """What every command is given.

    Args:
        terminal: The streams.
        services: The library.
        output: What the raw arguments say about JSON and debugging, until they are parsed.
        interrupts: Counts Ctrl-C, for a command that goes on after one.

    Attributes:
        command: The command's full name, "tsdoc ask".
        keeps: Whether what is prefilled can be resumed.
        kept: What else Ctrl-C leaves behind ("3 of 12 parts"), once there is some.
    """

    def __init__(
        self,
        *,
        terminal: Terminal,
        services: Services,
        output: Output,
        interrupts: Interrupts | None = None,
    ) -> None:
        self.terminal = terminal
        self.services = services
        self.interrupts = interrupts or Interrupts(terminal)
        self.output = output
        self.command = "tsdoc"
        self.keeps = False
        self.kept: str | None = None
        self.reporter = ConsoleReporter(terminal, quiet=output.quiet)

    def begin(self, command: str, output: Output) -> None:
        """The arguments are parsed; `command` ("tsdoc ask") starts."""
        self.command = command
        self.output = output
        self.reporter = ConsoleReporter(self.terminal, quiet=output.quiet)

    def settings(
        self,
        tuning: Tuning,
        *,
        model: Model | None = None,
        engine: Engine | None = None,
        sampling: Sampling | None = None,
        explaining: Explaining | None = None,
    ) -> ResolvedSettings:
        """Resolves all settings from options, profile and the user's config file.

        Raises:
            UsageError: an unknown setting or a value that does not fit.
        """
        from tsdoc.config import (
            assignment_layer,
            nested_layer,
            read_config_file,
            resolve_settings,
            user_config_path,
        )

        layers = _option_layers(model, engine, sampling, explaining)
        layers.append(assignment_layer(tuning.assignments))
        if tuning.profile is not None:
            content = self.services.load_profile(tuning.profile)
            layers.append(nested_layer(content, origin=f"profile {tuning.profile}"))
        user = read_config_file(user_config_path())
        return resolve_settings([*layers, user] if user else layers)

    def ingest_options(self, reading: Reading) -> IngestOptions:
        """Returns what the reading options ask of the readers.

        Raises:
            UsageError: page ranges that are none, two passwords, or a password file that cannot
                be read.
        """
        from tsdoc.ingest.options import IngestOptions

        return IngestOptions(
            pages=None if reading.pages is None else parse_pages(reading.pages),
            section=reading.section,
            include=tuple(reading.include),
            exclude=tuple(reading.exclude),
            password=find_password(file=reading.password_file, option=reading.password),
            strict=reading.strict,
        )

    @property
    def schema(self) -> str:
        """The name and version of the command's JSON: "tsdoc.ask/1"."""
        return f"{self.command.replace(' ', '.')}/1"

    def write_page(self, path: Path, page: str) -> None:
        """Writes an HTML page and says so.

        Raises:
            UsageError: it cannot be written there.
            ResourceError: the disk is full.
        """
        from tsdoc.report import write_page

        write_page(path, page)
        self.reporter.note(f"page written: {path}")

    def answer(self, fields: Mapping[str, object]) -> None:
        """Writes the command's JSON object, with its schema and the warnings."""
        self.terminal.json({"schema": self.schema, **fields, "warnings": self.warnings()})

    def fail(self, error: BaseException) -> None:
        """Says what ended the command: one line on stderr, and an object on stdout for JSON.

        Where neither can be written the exit code alone tells.
        """
        with contextlib.suppress(ResourceError):
            self.reporter.finish()
            self.terminal.error(error, debug=self.output.debug)
        if self.output.json:
            with contextlib.suppress(ResourceError):
                self.terminal.json({"schema": self.schema, "error": error_json(error)})
                self.terminal.flush()

    def interrupted(self) -> InterruptedRunError:
        """Returns the error that Ctrl-C ends in, which names what was kept."""
        if self.kept is not None:
            message = f"stopped; {self.kept} are kept, run the same command to go on"
            return InterruptedRunError(message)
        prefill = self.reporter.prefill
        keeps = self.keeps and all(warned.code != "not_kept" for warned in self.reporter.warnings)
        if prefill is None or prefill.total is None or not keeps:
            return InterruptedRunError("stopped")
        if not prefill.done:
            return InterruptedRunError("stopped; no block was finished, nothing new is kept")
        kept = f"{prefill.done:,} of {prefill.total:,} tokens are kept"
        return InterruptedRunError(f"stopped; {kept}, run the same command to go on")

    def warnings(self) -> list[dict[str, object]]:
        """Returns the warnings said so far, for JSON."""
        return [asdict(warned) for warned in self.reporter.warnings]


def error_json(error: BaseException) -> dict[str, object]:
    """Returns an error as JSON; one that tsdoc did not foresee has the code "internal"."""
    if isinstance(error, TsdocError):
        return {
            "code": error.code,
            "message": error.message,
            "where": error.where,
            "hint": error.hint,
        }
    return {
        "code": "internal",
        "message": f"{type(error).__name__}: {error}",
        "where": None,
        "hint": "Run it again with --debug for the traceback.",
    }


def _option_layers(
    model: Model | None,
    engine: Engine | None,
    sampling: Sampling | None,
    explaining: Explaining | None,
) -> list[Layer]:
    """Returns one layer for each option that was given."""
    from tsdoc.config import Layer

    given: list[tuple[str, str, object]] = []
    if model is not None:
        given.append(("--model", "model.source", model.model))
    if engine is not None:
        given.append(("--device", "engine.device", engine.device))
        given.append(("--no-store", "store.enabled", False if engine.no_store else None))
    if isinstance(engine, Engines):
        given.append(("--parallel", "parallel.tensor", engine.parallel))
    if sampling is not None:
        given += [
            ("--max-new-tokens", "answer.max_new_tokens", sampling.max_new_tokens),
            ("--temperature", "answer.temperature", sampling.temperature),
            ("--top-p", "answer.top_p", sampling.top_p),
            ("--seed", "answer.seed", sampling.seed),
        ]
    if explaining is not None:
        given.append((EVIDENCE, "answer.evidence", explaining.evidence))
    return [
        Layer(origin=f"option {flag}", values={key: value})
        for flag, key, value in given
        if value is not None
    ]
