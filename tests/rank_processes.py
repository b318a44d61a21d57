"""Ranks as processes: starts one program as many times as there are ranks, and takes what they say.

The program is a module. `take_task` in it gives the task and this rank's mesh, `give` its result.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tsdoc.kernels.meeting import join_ranks
from tsdoc.kernels.ranks import SOLO, Mesh


def run_processes(
    module: str, task: dict[str, Any], tensor: int, sequence: int = 1, *, timeout_s: float = 300
) -> list[dict[str, Any]]:
    """Runs `module` once per rank, at the same time, and returns the results.

    Args:
        module: Name of the program.
        task: What `take_task` gives; its "device" ("cpu" or "cuda") is where ranks meet.
        tensor: Degree of the tensor axis.
        sequence: Degree of the sequence axis.
        timeout_s: All are ended after so long.

    Raises:
        RuntimeError: one failed; what it wrote on stderr is in the message.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        processes = []
        for rank in range(tensor * sequence):
            place = [str(Path(name) / "meeting"), str(rank), str(tensor), str(sequence)]
            errors = (Path(name) / f"errors-{rank}").open("w+")
            process = subprocess.Popen(
                [sys.executable, "-m", module, *place, json.dumps(task)],
                stdout=subprocess.PIPE,
                stderr=stack.enter_context(errors),
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append((process, errors))
        return _results(processes, module, time.monotonic() + timeout_s)


def _results(processes: list[Any], module: str, until: float) -> list[dict[str, Any]]:
    running = [process for process, _ in processes]
    while any(process.poll() is None for process in running) and time.monotonic() < until:
        if any(process.poll() for process in running):
            break  # the others would wait for it
        time.sleep(0.05)
    for rank, (process, errors) in enumerate(processes):
        if process.poll():
            errors.seek(0)
            raise RuntimeError(f"rank {rank} of {module} failed:\n{errors.read()[-3000:]}")
    if any(process.poll() is None for process in running):
        raise RuntimeError(f"{module} took too long")
    return [json.loads(process.stdout.read().splitlines()[-1]) for process in running]


def take_task() -> tuple[dict[str, Any], Mesh]:
    """What the program has to do, and its place among the ranks."""
    from tsdoc.kernels.devices import choose_gpu

    meeting, rank, tensor, sequence = sys.argv[1], *map(int, sys.argv[2:5])
    task: dict[str, Any] = json.loads(sys.argv[5])
    if task["device"] == "cuda":
        choose_gpu(rank)
    size = tensor * sequence
    if size == 1:
        return task, SOLO
    return task, join_ranks(Path(meeting), rank, tensor, sequence, task["device"])


def give(result: dict[str, Any]) -> None:
    """Says the result and ends this process, whatever connects it with others."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(0)
