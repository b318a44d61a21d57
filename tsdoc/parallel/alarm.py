"""A rank that is lost ends what the leader computes meanwhile, not what waits for it alone."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tsdoc.errors import RankError

GRACE_S = 2.0  # for the leader to come to what waits for the rank, which says more


class LostRankError(RankError):
    """Raised from outside in a thread that computes with a rank which has ended."""

    def __init__(self) -> None:
        super().__init__(
            "another rank ended",
            hint="What was prefilled is kept; run the same command to go on.",
        )


class Alarm:
    """Ends a thread's operation, between two steps of Python's, once it is rung."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._noticed = threading.Event()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """While entered, this thread is ended by LostRankError when the alarm is rung."""
        with self._lock:
            self._thread = threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                self._thread = None

    def notice(self) -> None:
        """The alarm is needed no more."""
        self._noticed.set()

    def ring(self) -> None:
        """Ends what is under way, unless somebody notices by himself."""
        if self._noticed.wait(GRACE_S):
            return
        with self._lock:
            if self._thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(LostRankError)
                )
