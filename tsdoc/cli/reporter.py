"""Progress, notes, warnings and questions on stderr: the command line's `Reporter`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tsdoc.cli.console import Terminal
from tsdoc.terminal import format_bytes, format_duration, visible_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

LINE_EVERY_S = 30.0
RATE_OVER_S = 120.0
BAR_WIDTH = 12
ECHO_WIDTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """A warning that was said, as it goes into JSON."""

    code: str
    where: str
    message: str


class Stage:
    """One stage of work: how far it is, how fast, and how long it will take.

    Attributes:
        done: Units that are finished.
        reached: The same, and what is computed of those that are not finished.
    """

    def __init__(self, name: str, total: int | None, unit: str, *, now: float) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = 0
        self.reached = 0
        self.started = now
        self._samples: deque[tuple[float, int]] = deque([(now, 0)])

    def advance(self, done: int, *, now: float) -> None:
        """Takes `done` units as finished at time `now` (seconds of a monotonic clock)."""
        self.done = done
        self._reach(done, now=now)

    def working(self, units: int, *, now: float) -> None:
        """Takes `units` behind the finished ones as computed, but not finished."""
        self._reach(self.done + units, now=now)

    def _reach(self, reached: int, *, now: float) -> None:
        self.reached = reached
        # What a resumed run finds done, and what passes before the work begins, say nothing about
        # the rate.
        if now - self.started < 1 or reached <= self._samples[0][1]:
            self._samples.clear()
        self._samples.append((now, reached))
        while len(self._samples) > 2 and now - self._samples[1][0] > RATE_OVER_S:
            self._samples.popleft()

    def rate(self) -> float | None:
        """Units per second over the last two minutes; None while unknown."""
        (first_time, first), (last_time, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_time - first_time) if last_time > first_time else None

    def describe(self, *, now: float) -> str:
        """Returns "45,056 of 105,312 tokens, 43 %, 143/s, 7 min left"."""
        if self.total is None:
            parts = [quantity(self.reached, self.unit)] if self.reached else []
        else:
            done = min(self.reached, self.total)
            parts = [f"{amount(done, self.unit)} of {quantity(self.total, self.unit)}"]
            if self.total:
                parts.append(f"{100 * done // self.total} %")
        rate = self.rate()
        if rate:
            if rate >= 1:
                parts.append(f"{amount(round(rate), self.unit)}/s")
            if self.total is not None:
                since = now - self._samples[-1][0]
                left = max(0.0, (self.total - self.reached) / rate - since)
                parts.append(f"{duration(left)} left")
        elif now - self.started >= 1:
            parts.append(f"{duration(now - self.started)} so far")
        return ", ".join(parts)


class ConsoleReporter:
    """Implements `tsdoc.progress.Reporter` on stderr.

    On a terminal one line is redrawn and vanishes at the end of its stage; elsewhere a plain line
    comes every 30 s, also where stages are shorter. `quiet` leaves warnings and questions.

    Attributes:
        warnings: What was warned of so far.
        stage: The stage that is going on.
        prefill: The last stage with a known number of tokens, also after its end.
    """

    def __init__(
        self, terminal: Terminal, *, quiet: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.warnings: list[Warned] = []
        self.stage: Stage | None = None
        self.prefill: Stage | None = None
        self._terminal = terminal
        self._quiet = quiet
        self._clock = clock
        self._live: Live | None = None
        self._last_line = clock()

    def start(self, stage: str, total: int | None, unit: str) -> None:
        """A stage begins; a stage that was left open ends."""
        self.finish()
        self.stage = Stage(stage, total, unit, now=self._clock())
        if unit == "tokens" and total is not None:
            self.prefill = self.stage
        if self._terminal.animated and not self._quiet:
            from rich.live import Live

            console = self._terminal.rich(self._terminal.stderr, terminal=True)
            self._live = Live(
                console=console,
                get_renderable=lambda: self._render(console.width),
                transient=True,
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        elif self._line_is_due(self.stage.started):
            self._terminal.say(f"{stage} …")

    def _line_is_due(self, now: float) -> bool:
        """Whether it is time for a line where none is redrawn; if so, the next one is counted."""
        due = self._live is None and not self._quiet and now - self._last_line >= LINE_EVERY_S
        if due:
            self._last_line = now
        return due

    def advance(self, done: int) -> None:
        """`done` units of the stage are finished."""
        if self.stage is None:
            return
        now = self._clock()
        self.stage.advance(done, now=now)
        if done != self.stage.total:
            self._say_progress(self.stage, now)

    def working(self, units: int) -> None:
        """`units` behind the finished ones are computed, but not finished."""
        if self.stage is None:
            return
        now = self._clock()
        self.stage.working(units, now=now)
        self._say_progress(self.stage, now)

    def _say_progress(self, stage: Stage, now: float) -> None:
        if self._line_is_due(now):
            self._terminal.say(f"{stage.name}: {stage.describe(now=now)}")

    def finish(self) -> None:
        """The stage is over; its line vanishes."""
        self.stage = None
        self.pause()

    def pause(self) -> None:
        """Takes the progress line away and keeps how far the stage is."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def note(self, message: str) -> None:
        """Says one line, unless quiet."""
        if not self._quiet:
            self._say(message)

    def gap(self) -> None:
        """Leaves a line empty between an answer and the notes below it on the same screen."""
        if self._terminal.answers_on_screen and self._terminal.stderr.isatty():
            self.note("")

    def warn(self, code: str, where: str, message: str, *, again: bool = False) -> None:
        """Says a warning and keeps it for JSON; the same one is said once, or `again` each time."""
        warned = Warned(code=code, where=where, message=message)
        known = warned in self.warnings
        if not known:
            self.warnings.append(warned)
        if again or not known:
            self._say(f"warning: {where}: {message}" if where else f"warning: {message}")

    def confirm(self, question: str, *, enter: bool = True) -> bool:
        """Asks on a terminal, where Enter alone means `enter`; elsewhere says it and goes ahead."""
        if not self._terminal.interactive:
            self.note(f"{question} (no terminal to ask on: yes)")
            return True
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        answer = self._terminal.prompt(f"{question} {'[Y/n]' if enter else '[y/N]'}")
        if not answer:  # the end of input is no consent
            self._terminal.say("")
        if live is not None:
            live.start()
            self._live = live
        said = answer.strip().lower() if answer else "no"
        return said in ("y", "yes") or (enter and not said)

    def _say(self, message: str) -> None:
        if self._live is not None:
            from rich.text import Text

            self._live.console.print(Text(visible_line(message)))
        else:
            self._terminal.say(message)

    def _render(self, width: int) -> RenderableType:
        from rich.constrain import Constrain
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        stage = self.stage
        line = Table.grid(padding=(0, 1))
        if stage is None:
            return line
        bar = ProgressBar(total=stage.total, completed=stage.reached, width=BAR_WIDTH)
        text = Text(stage.describe(now=self._clock()), no_wrap=True, overflow="ellipsis")
        line.add_row(Text(visible_line(stage.name), no_wrap=True, overflow="ellipsis"), bar, text)
        # A terminal echoes ^C behind the line; on a full one it would wrap and leave it standing.
        return Constrain(line, width - ECHO_WIDTH)


def amount(value: int, unit: str) -> str:
    """Returns a number as people read it: bytes in kB, MB or GB, all else with thousands marked."""
    return format_bytes(value) if unit == "bytes" else f"{value:,}"


def quantity(value: int, unit: str) -> str:
    """Returns a number with its unit: "4,096 tokens", "12.5 MB"."""
    return amount(value, unit) if unit == "bytes" else f"{value:,} {unit}"


duration = format_duration
