"""The machine, and the memory this process takes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import threading
from pathlib import Path
from types import TracebackType

from tsdoc import __version__
from tsdoc.kernels.devices import device_bytes
from tsdoc.kernels.timing import device_name
from tsdoc.profile.results import Machine

SAMPLE_EVERY_S = 0.1


def describe_machine(device: str) -> Machine:
    """Describes what "cpu" or "cuda" runs on."""
    import psutil
    import torch

    on_gpu = device == "cuda"
    versions = {"tsdoc": __version__, "python": platform.python_version()}
    for package in ("torch", "triton"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return Machine(
        cpu=_cpu_name(),
        num_cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        gpu=device_name(torch.device(device)),
        gpu_bytes=device_bytes("cuda") if on_gpu else None,
        system=f"{platform.system()} {platform.release()}",
        versions=versions,
    )


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class MemoryWatch:
    """While entered, looks ten times a second how much memory of its own the process has.

    Attributes:
        peak_bytes: The most that was seen; mapped files, which the system can drop, do not count.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tsdoc-memory", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())
            if self._stop.wait(SAMPLE_EVERY_S):
                return


def anonymous_bytes() -> int:
    """Memory of this process that is no mapped file (RssAnon); all of it where that is unknown."""
    path = Path("/proc/self/status")
    if path.exists():
        for line in path.read_text("ascii", errors="replace").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    import psutil

    return int(psutil.Process().memory_info().rss)
