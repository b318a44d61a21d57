"""The followers' processes: started by the leader, told what to do through a pipe, watched.

A follower ends when its pipe does, so none outlives the leader. When one ends, the others are
ended at once, so that no rank waits for it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tsdoc.errors import RankError
from tsdoc.parallel.job import Job

READY = "ready"
POLL_S = 0.02
END_S = 3.0  # for a process to end once it is told to
_START = (
    "import sys; sys.path.append(sys.argv[1]); from tsdoc.parallel.follow_main import main; main()"
)


class Others(Protocol):
    """Ranks 1 … size - 1 of a job, as the leader reaches them."""

    def has_lost(self) -> bool:
        """Whether one has ended."""

    def why(self) -> RankError:
        """Says which one ended, as far as that is known."""

    def send(self, message: Any) -> None:
        """Tells all what comes next.

        Raises:
            RankError: one ended.
        """

    def close(self) -> None:
        """Lets them end in good order."""

    def end(self) -> None:
        """Ends them at once."""


class Processes:
    """See `Others`: processes of this machine, which this one starts.

    Args:
        job: What they work on.

    Attributes:
        meeting: A file by which the ranks find each other, in a private directory.
        on_lost: Called, in a thread of its own, once a child has ended by itself.
    """

    def __init__(self, job: Job) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="tsdoc-ranks-"))
        self.meeting = self._directory / "meeting"
        self._closing = False
        self.on_lost: Callable[[], None] = lambda: None
        self._lost: str | None = None
        self._ready = 0
        self._changed = threading.Condition()
        self._children: list[subprocess.Popen[str]] = []
        self._watchers: list[threading.Thread] = []
        try:
            for rank in range(1, job.size):
                self._children.append(self._start(job, rank))
        except BaseException:
            self.end()
            raise

    def _start(self, job: Job, rank: int) -> subprocess.Popen[str]:
        root = str(Path(__file__).resolve().parents[2])
        child = subprocess.Popen(
            # -P: the current folder is no place to import from.
            [sys.executable, "-P", "-c", _START, root, str(rank), str(self.meeting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the leader, which then ends this process
        )
        watcher = threading.Thread(
            target=self._watch, args=(child, rank, job.size), name="tsdoc-rank", daemon=True
        )
        watcher.start()
        self._watchers.append(watcher)
        self._write(child, job.to_json())
        return child

    def _watch(self, child: subprocess.Popen[str], rank: int, size: int) -> None:
        """Follows what a child says until it ends."""
        assert child.stdout is not None  # noqa: S101 - asked for
        said: str | None = None
        with child.stdout:
            for line in child.stdout:
                if line.strip() == READY:
                    with self._changed:
                        self._ready += 1
                        self._changed.notify_all()
                elif line.startswith("{"):
                    said = str(json.loads(line)["error"])
        code = child.wait()
        if self._closing:
            return
        how = said or (f"signal {-code}" if code < 0 else f"exit code {code}")
        with self._changed:
            if self._lost is None and (said is not None or code < 0):
                self._lost = f"rank {rank} of {size} ended ({how})"
            self._changed.notify_all()
        self._kill()
        self.on_lost()

    def wait_until_ready(self) -> None:
        """Returns once all children are about to meet.

        Raises:
            RankError: one ended.
        """
        self.wait_for(lambda: self._ready == len(self._children))

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Returns once `is_done`, which is asked again and again.

        Raises:
            RankError: a child ended meanwhile.
        """
        while not is_done():
            if self.has_lost():
                raise self.why()
            with self._changed:
                self._changed.wait(POLL_S)

    def has_lost(self) -> bool:
        """Whether a child has ended."""
        return any(child.poll() is not None for child in self._children)

    def why(self) -> RankError:
        """Says which child ended first, and how; waits a little until that is known."""
        until = time.monotonic() + END_S
        with self._changed:
            while self._lost is None and time.monotonic() < until:
                self._changed.wait(POLL_S)
        return RankError(
            self._lost or "another rank ended",
            hint="What was prefilled is kept; run the same command to go on.",
        )

    def met(self) -> None:
        """The ranks have found each other: the file is not needed any more."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def send(self, message: Any) -> None:
        """Tells all children what comes next.

        Raises:
            RankError: one ended.
        """
        line = json.dumps(message, default=int)  # numpy's numbers too
        for child in self._children:
            self._write(child, line)

    def _write(self, child: subprocess.Popen[str], line: str) -> None:
        assert child.stdin is not None  # noqa: S101 - asked for
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
        except (OSError, ValueError) as error:
            raise self.why() from error

    def close(self) -> None:
        """Lets the children end in good order."""
        self._closing = True
        self._close_pipes()
        until = time.monotonic() + END_S
        while time.monotonic() < until and self._running():
            time.sleep(POLL_S)
        self.end()

    def end(self) -> None:
        """Ends the children at once."""
        self._closing = True
        self._kill()
        self._close_pipes()
        for child in self._children:
            child.wait()
        for watcher in self._watchers:
            watcher.join()
        self.met()

    def _running(self) -> bool:
        return any(child.poll() is None for child in self._children)

    def _close_pipes(self) -> None:
        for child in self._children:
            if child.stdin is not None:
                with contextlib.suppress(OSError):  # of one that has ended with lines unread
                    child.stdin.close()

    def _kill(self) -> None:
        for child in self._children:
            child.kill()
