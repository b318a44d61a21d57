"""The machine that a profile was measured on."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

from tsdoc import __version__
from tsdoc.kernels.devices import device_bytes
from tsdoc.kernels.timing import device_name
from tsdoc.profile.results import Machine
from tsdoc.session.calibration import num_cpus


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
        num_cores=num_cpus(),
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
