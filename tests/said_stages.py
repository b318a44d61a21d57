"""`tsdoc` itself, which says on a descriptor what its ranks are about to do: one JSON a line.

    python -m tests.said_stages FD ARGUMENT...

Nothing waits for who reads it, so a rank that is killed upon a line is killed in that stage.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

OPERATIONS = {
    "load": "open",
    "save": "save",
    "run_step": "answer",
    "run_device_step": "answer",
    "soft_votes": "evidence",
    "attention_mass": "evidence",
}


def say_stages(say: Callable[..., None]) -> None:
    """Makes the leader of this process say its stages."""
    from tsdoc.parallel.leader import Leader
    from tsdoc.parallel.processes import Processes

    start, ready, load = Processes.__init__, Processes.wait_until_ready, Leader.load
    send, close = Processes.send, Leader.close

    def said_start(self: Processes, *args: Any) -> None:
        start(self, *args)
        say("start", pids=[child.pid for child in self._children])

    def said_ready(self: Processes) -> None:
        ready(self)
        say("meet")

    def said_load(self: Leader) -> Any:
        say("load")
        return load(self)

    def said_send(self: Processes, message: dict[str, Any]) -> None:
        send(self, message)
        operation = message["do"]
        if operation == "run_chunks":
            say("question" if message["need_logits"] else "prefill")
        elif operation in OPERATIONS:
            say(OPERATIONS[operation])

    def said_close(self: Leader) -> None:
        say("close")
        close(self)

    Processes.__init__ = said_start  # type: ignore[method-assign, assignment]
    Processes.wait_until_ready = said_ready  # type: ignore[method-assign]
    Processes.send = said_send  # type: ignore[method-assign]
    Leader.load = said_load  # type: ignore[method-assign]
    Leader.close = said_close  # type: ignore[method-assign]


def main() -> None:
    fd = int(sys.argv[1])
    sys.argv = ["tsdoc", *sys.argv[2:]]

    def say(stage: str, **more: object) -> None:
        os.write(fd, json.dumps({"stage": stage, **more}).encode() + b"\n")

    say_stages(say)
    from tsdoc.__main__ import main as run

    run()


if __name__ == "__main__":
    main()
