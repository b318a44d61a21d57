"""Ctrl-C: the first stops the command in good order, the second ends the process at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

from tsdoc.cli.console import Terminal

EXIT_CODE = 130


class Interrupts:
    """While entered, the first SIGINT raises KeyboardInterrupt and the next one exits hard."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._count = 0

    def __enter__(self) -> Interrupts:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        # What is left is the interpreter's own shutdown: nothing there can be stopped in order.
        self._count += 1

    def forgive(self) -> None:
        """The command goes on after a Ctrl-C: the next one counts as the first again."""
        self._count = 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            self._terminal.restore()
            os._exit(EXIT_CODE)
        raise KeyboardInterrupt
