"""Which device the engine runs on."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tsdoc.errors import ResourceError

if TYPE_CHECKING:
    import torch

Device = Literal["cpu", "cuda"]
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # Linux, x86-64
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # without one of these, a Linux machine has no CUDA device


def resolve_device(wanted: Literal["auto", "cpu", "cuda"]) -> Device:
    """Returns the device for a setting; auto is the GPU where there is one that can be used.

    Raises:
        ResourceError: "cuda" is asked for and cannot be had.
    """
    if wanted == "cpu":
        return "cpu"
    missing = _what_is_missing()
    if missing is None:
        return "cuda"
    if wanted == "cuda":
        raise ResourceError(
            f"{missing}, so the model cannot run on a GPU", hint="Use --device cpu."
        )
    return "cpu"


def has_matrix_tiles() -> bool:
    """Whether this process may multiply matrices of bfloat16 in tiles (Intel's AMX).

    Without them bfloat16 is slower than float32, also where the processor has it for vectors.
    """
    return "amx_bf16" in processor_line("flags").split() and _are_tiles_granted()


def processor_line(name: str) -> str:
    """Returns what Linux says of the first processor's `name`; "" where it says nothing."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            return next((line for line in lines if line.split("\t")[0] == name), "")
    except OSError:
        return ""


def device_bytes(wanted: Literal["auto", "cpu", "cuda"]) -> int:
    """Memory of the GPU that `wanted` resolves to; 0 for the CPU."""
    if resolve_device(wanted) == "cpu":
        return 0
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def count_gpus() -> int:
    """Returns how many CUDA devices there are."""
    import torch

    return int(torch.cuda.device_count())


def choose_gpu(rank: int) -> None:
    """Makes a GPU of this machine this process's own: another one for every rank."""
    import torch

    torch.cuda.set_device(rank % count_gpus())


def own_gpu() -> torch.device:
    """Returns the GPU that this process chose."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def finish_work() -> None:
    """Returns once this process's GPU has done all that it was given."""
    import torch

    torch.cuda.synchronize()


def _are_tiles_granted() -> bool:
    """Asks Linux for the tiles' registers, as whoever uses them has to; sandboxes may refuse."""
    syscall = ctypes.CDLL(None).syscall
    return bool(syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def _what_is_missing() -> str | None:
    # torch takes seconds to import, so the driver is looked for first.
    if sys.platform == "linux" and not any(Path(path).exists() for path in DRIVERS):
        return "this machine has no NVIDIA driver"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import torch

    return None if torch.cuda.is_available() else "torch finds no CUDA device"
