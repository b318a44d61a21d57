"""Ctrl-C: the first stops the command in good order, the second ends the process at once.

SIGTERM, as `kill` sends it, is the same, and no command goes on after it.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from tsdoc.cli.console import Terminal

EXIT_CODE = 130


class Interrupts:
    """While entered, the first SIGINT raises KeyboardInterrupt and the next one exits hard.

    So does SIGTERM, after which `forgive` raises KeyboardInterrupt too.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._count = 0
        self._terminated = False

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        # What is left is the interpreter's own shutdown: nothing there can be stopped in order.
        self._count += 1

    @property
    def came(self) -> bool:
        """Whether a signal has come that was not forgiven."""
        return self._count > 0

    def forgive(self) -> None:
        """The command goes on after a Ctrl-C: the next one counts as the first again."""
        if self._terminated:
            raise KeyboardInterrupt
        self._count = 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self._terminated |= number == signal.SIGTERM
        if self._count > 1:
            self._terminal.restore()
            os._exit(EXIT_CODE)
        raise KeyboardInterrupt
