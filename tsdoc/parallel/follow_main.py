"""A follower's process: repeats what the leader announces until the leader closes the pipe."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Follows rank 0; arguments are the place of the package, the rank, and the meeting file."""
    rank, meeting = int(sys.argv[2]), sys.argv[3]
    _end_with_leader()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), name="tsdoc-leader", daemon=True).start()
    try:
        _follow(rank, meeting, lines)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the leader says it
        _report(error)
    os._exit(1)


def _end_with_leader() -> None:
    """On Linux, the kernel ends this process with the leader, even one that is stopped."""
    leader = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != leader:
            os._exit(1)


def _read(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)  # the leader is gone or has finished


def _follow(rank: int, meeting: str, lines: queue.SimpleQueue[str]) -> None:
    from tsdoc.parallel.job import Job, load_shard

    job = Job.from_json(lines.get())
    import torch  # noqa: F401 - before it says that it is ready

    from tsdoc.kernels.devices import choose_gpu
    from tsdoc.kernels.meeting import join_ranks
    from tsdoc.parallel.follower import Follower

    if job.device == "cuda":
        choose_gpu(rank)
    _say("ready")
    mesh = join_ranks(Path(meeting), rank, job.tensor, job.sequence, job.device)
    follower = Follower(load_shard(job, mesh), mesh)
    while True:
        message: dict[str, Any] = json.loads(lines.get())
        follower.do(message)


def _report(error: BaseException) -> None:
    """Tells the leader what went wrong here; that another rank ended is not news to it."""
    from tsdoc.errors import RankError, TsdocError

    if not isinstance(error, RankError):
        text = str(error) if isinstance(error, TsdocError) else f"{type(error).__name__}: {error}"
        _say(json.dumps({"error": text}))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
