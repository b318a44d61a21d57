"""Starts the reader process, passes requests to it, and survives its death.

Native readers of foreign documents crash, hang and eat memory. They run in a process of their own
that limits itself; when it dies, the unit it was at is known, and the work goes on without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tsdoc.errors import InputError, ResourceError
from tsdoc.ingest.frames import LARGEST_FRAME, Message, encode_frame
from tsdoc.ingest.options import Limits
from tsdoc.ingest.worker_main import OUT_OF_MEMORY

# The reader is of the same tsdoc as its parent, whichever one is installed; what lies beside that
# package must not come before the standard library.
_START = """
import sys
root = sys.argv[1]
sys.path.insert(0, root)
import tsdoc
sys.path.remove(root)
sys.path.append(root)
from tsdoc.ingest.worker_main import main
main()
"""


class WorkerDiedError(Exception):
    """The reader process ended or was ended while it was at `unit`; `reason` says why."""

    def __init__(self, unit: str, reason: str) -> None:
        super().__init__(f"{unit}: {reason}")
        self.unit = unit
        self.reason = reason


@dataclass(slots=True)
class Reading:
    """What a reader process gave for one file.

    Attributes:
        messages: The reader's messages, in order.
        failed: Units that killed the process, and why.
        incomplete: Why the rest of the file was given up; None when it was read to its end.
    """

    messages: list[Message] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    incomplete: str | None = None


class Worker:
    """A reader process, started when it is first needed and again after a crash."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            # What a dead process never read is still in a buffer, which cannot be written.
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def read(
        self, request: Message, on_message: Callable[[Message], None] | None = None
    ) -> Reading:
        """Runs a request to its end, again after a crash, each time without what crashed.

        The request's reader gets `done`, the number of messages that are already here, and
        `failed`, the units to avoid.

        Raises:
            InputError: the reader refuses the file.
            ResourceError: no process can be started.
        """
        reading = Reading()
        while True:
            state = {"done": len(reading.messages), "failed": list(reading.failed)}
            try:
                for message in self._run({**request, **state}):
                    reading.messages.append(message)
                    if on_message is not None:
                        on_message(message)
                return reading
            except WorkerDiedError as death:
                again = death.unit in reading.failed
                reading.failed[death.unit] = death.reason
                if again or len(reading.failed) > self._limits.num_restarts:
                    reading.incomplete = death.reason
                    return reading

    def _run(self, request: Message) -> Iterator[Message]:
        """Sends one request and yields the messages that answer it."""
        process = self._started()
        assert process.stdin is not None  # noqa: S101 - asked for in Popen
        finished = False
        unit = "start"
        try:
            process.stdin.write(encode_frame(request))
            process.stdin.flush()
            while True:
                frame = self._receive(process)
                if "unit" in frame:
                    unit = frame["unit"]
                elif "message" in frame:
                    yield frame["message"]
                else:
                    finished = True
                    break
        except (BrokenPipeError, EOFError) as error:
            raise WorkerDiedError(unit, self._why_ended(process)) from error
        except TimeoutError as error:
            raise WorkerDiedError(unit, "did not answer") from error
        finally:
            if not finished:
                self.close()
        if "error" in frame:
            raise InputError(frame["error"], hint=frame["hint"])

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            root = str(Path(__file__).resolve().parents[2])
            try:
                self._process = subprocess.Popen(
                    # -P: the current folder is no place to import from.
                    [sys.executable, "-P", "-c", _START, root],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,  # Ctrl-C is for the parent, which then ends this one
                )
            except OSError as error:
                raise ResourceError(
                    f"no reader process can be started ({error.strerror})",
                    hint="`ulimit -a` shows what limits processes, memory and open files.",
                ) from error
            assert self._process.stdin is not None  # noqa: S101 - asked for above
            limits = {
                "worker_bytes": self._limits.worker_bytes,
                "unit_cpu_s": self._limits.unit_cpu_s,
            }
            self._process.stdin.write(encode_frame(limits))
        return self._process

    def _receive(self, process: subprocess.Popen[bytes]) -> Message:
        deadline = time.monotonic() + self._limits.unit_wall_s
        num_bytes = int.from_bytes(_read_exactly(process, 4, deadline), "big")
        if num_bytes > LARGEST_FRAME:
            raise EOFError
        message: Message = json.loads(_read_exactly(process, num_bytes, deadline))
        return message

    def _why_ended(self, process: subprocess.Popen[bytes]) -> str:
        code = process.wait()
        if code == -signal.SIGPROF:
            return "took too long"
        if code == OUT_OF_MEMORY:
            return "needs too much memory"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            return f"crashed the reader ({name})"
        return "crashed the reader"


def _read_exactly(process: subprocess.Popen[bytes], num_bytes: int, deadline: float) -> bytes:
    assert process.stdout is not None  # noqa: S101 - asked for in Popen
    descriptor = process.stdout.fileno()
    blocks: list[bytes] = []
    while num_bytes > 0:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        block = os.read(descriptor, min(num_bytes, 1 << 20))
        if not block:
            raise EOFError
        blocks.append(block)
        num_bytes -= len(block)
    return b"".join(blocks)
