"""The reader process: reads one foreign document or template at a time under hard limits.

It is started by `tsdoc.ingest.worker`, gets requests on standard input and answers on standard
output (see `tsdoc.ingest.frames`). Before each unit of work (opening, a page, a chapter) it names
the unit and sets a CPU timer that kills it, so that whoever waits knows what was at fault.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

from tsdoc.errors import InputError
from tsdoc.ingest.frames import Message, Reader, encode_frame, read_frame

OUT_OF_MEMORY = 75
"""Exit code of a reader process that reached its memory limit."""

_BYTES_PER_S = 1 << 20


def main() -> None:
    """Serves requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the frames
    requests = os.fdopen(0, "rb")
    first = read_frame(requests)
    if first is None:
        return
    _limit_memory(int(first["worker_bytes"]))
    cpu_s = float(first["unit_cpu_s"])

    def send(message: Message) -> None:
        answers.write(encode_frame(message))
        answers.flush()

    def begin(unit: str, num_bytes: int) -> None:
        send({"unit": unit})
        _set_timer(cpu_s + num_bytes / _BYTES_PER_S)

    while (request := read_frame(requests)) is not None:
        try:
            for message in _reader(request["reader"])(request, begin):
                send({"message": message})
            send({"end": True})
        except InputError as error:
            send({"error": error.message, "hint": error.hint})
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # there is none left for an orderly end
        _set_timer(0)


def _reader(name: str) -> Reader:
    """Returns the function that a request names as "module:function"."""
    module, _, function = name.partition(":")
    reader: Reader = getattr(importlib.import_module(module), function)
    return reader


def _set_timer(cpu_s: float) -> None:
    """Ends this process after so many seconds of CPU time; 0 never does."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _limit_memory(num_bytes: int) -> None:
    """Limits what this process may allocate on top of what it has; files mapped do not count."""
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:  # the user's own limit, which nobody may raise
        num_bytes = min(num_bytes, most)
    resource.setrlimit(kind, (num_bytes, num_bytes))
