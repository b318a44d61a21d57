"""What long work tells whoever started it: stages with progress, notes, warnings, questions."""

from __future__ import annotations

from typing import Protocol


class Reporter(Protocol):
    """Receives progress; the command line shows it, tests record it, scripts ignore it."""

    def start(self, stage: str, total: int | None, unit: str) -> None:
        """A stage begins; `total` units of work are ahead, or None when unknown."""

    def advance(self, done: int) -> None:
        """`done` units of the current stage are finished (absolute, not an increment)."""

    def working(self, units: int) -> None:
        """Work behind those is as far as if `units` more were done; none of it is kept yet."""

    def finish(self) -> None:
        """The current stage is over."""

    def note(self, message: str) -> None:
        """One line of information."""

    def warn(self, code: str, where: str, message: str) -> None:
        """Trouble with a part of the work that goes on."""

    def confirm(self, question: str) -> bool:
        """Asks [Y/n] on a terminal; elsewhere says the question and answers yes."""


class Silent:
    """A reporter that shows nothing and agrees to everything."""

    def start(self, stage: str, total: int | None, unit: str) -> None:
        """Ignored."""

    def advance(self, done: int) -> None:
        """Ignored."""

    def working(self, units: int) -> None:
        """Ignored."""

    def finish(self) -> None:
        """Ignored."""

    def note(self, message: str) -> None:
        """Ignored."""

    def warn(self, code: str, where: str, message: str) -> None:
        """Ignored."""

    def confirm(self, question: str) -> bool:
        """Agrees."""
        return True
