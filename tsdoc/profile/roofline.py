"""The machine's ceilings, measured on the spot, and each kind of work beside them."""

from __future__ import annotations

import torch

from tsdoc.kernels.timing import Timer
from tsdoc.profile.counts import Work
from tsdoc.profile.results import Ceilings, Kernel

LIMIT_S = 1.5
COPY_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}
PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}


def measure_ceilings(device: torch.device, dtype: torch.dtype, timer: Timer) -> Ceilings:
    """Bandwidth of a copy (bytes read plus written) and rate of a square matrix product."""
    ceilings = Ceilings(
        copy_bytes_per_s=_copy_rate(device, COPY_BYTES[device.type], timer),
        flops_per_s=_product_rate(device, dtype, PRODUCT_SIZE[device.type], timer),
        dtype=str(dtype).removeprefix("torch."),
    )
    timer.release()
    return ceilings


def _copy_rate(device: torch.device, num_bytes: int, timer: Timer) -> float:
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    # A copy may go through the device's copy engines, which are slower than its kernels.
    copies = timer.repeat(lambda: target.copy_(source), limit_s=LIMIT_S)
    kernels = timer.repeat(lambda: torch.neg(source, out=target), limit_s=LIMIT_S)
    return 2 * num_bytes / min(*copies, *kernels)


def _product_rate(device: torch.device, dtype: torch.dtype, size: int, timer: Timer) -> float:
    a = torch.randn(size, size, dtype=dtype, device=device)
    b = torch.randn(size, size, dtype=dtype, device=device)
    out = torch.empty_like(a)
    times = timer.repeat(lambda: torch.mm(a, b, out=out), limit_s=LIMIT_S)
    return 2.0 * size**3 / min(times)


def make_kernel(name: str, phase: str, seconds: float, work: Work, ceilings: Ceilings) -> Kernel:
    """Sets a measured time beside the least that its bytes and operations could take."""
    memory_s = work.num_bytes / ceilings.copy_bytes_per_s
    compute_s = work.num_flops / ceilings.flops_per_s
    return Kernel(
        name=name,
        phase="prefill" if phase == "prefill" else "decode",
        seconds=seconds,
        num_bytes=work.num_bytes,
        num_flops=work.num_flops,
        floor_s=max(memory_s, compute_s),
        bound="memory" if memory_s >= compute_s else "compute",
    )
