"""K and V in host memory that the device reads directly, for prompts larger than its own memory.

Kernels that read few rows (gathering, candidates of the key index) or write them go over the bus.
What reads all keys of a layer, the exact selection of a prefill, gets them in a buffer on the
device: while one layer computes, the next one's keys are on their way.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from tsdoc.errors import ResourceError

PAGE_SIZE = 256


def host_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor in host memory that `device` can read and write.

    Raises:
        ResourceError: so much memory cannot be pinned.
    """
    tensor = torch.empty(*shape, dtype=dtype)
    size = tensor.numel() * tensor.itemsize
    if device.type != "cuda" or not size:
        return tensor
    # Not torch's own pinned memory, whose sizes are rounded up to powers of two.
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch gives it no types
    address = tensor.data_ptr()
    status = int(runtime.cudaHostRegister(address, size, 0))
    if status:
        raise ResourceError(
            f"{size / 1e9:.1f} GB of host memory cannot be pinned for the GPU (error {status})",
            hint="Free some memory, raise the limit of locked memory, or read less.",
        )
    weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address)
    return tensor


class KeyStage:
    """Keys of one layer on the device, copied from host memory, and the next layer's behind it.

    Args:
        keys: Per layer [num_slots, num_kv_heads, head_dim] in host memory.
        device: Where they are wanted.
    """

    def __init__(self, keys: Sequence[torch.Tensor], device: torch.device) -> None:
        self._keys = keys
        self._on_cuda = device.type == "cuda"
        self._buffers = [torch.zeros(keys[0].shape, dtype=keys[0].dtype, device=device)] * 2
        self._buffers[1] = torch.zeros_like(self._buffers[0])
        self._held: list[tuple[int, int]] = [(-1, 0), (-1, 0)]  # layer, rows
        self._turn = 0
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event() if self._on_cuda else None  # type: ignore[no-untyped-call]

    @staticmethod
    def bytes_for(num_slots: int, row_bytes: int) -> int:
        """Device memory that a stage of so many slots takes."""
        return 2 * num_slots * row_bytes

    def forget(self) -> None:
        """What is held is no longer what the host has."""
        self._held = [(-1, 0), (-1, 0)]

    def get(self, layer: int, written: int, end: int) -> torch.Tensor:
        """Keys of a layer, of which rows [0, end) are right, until another layer is asked for.

        Args:
            layer: Which.
            written: Rows from here on may have been written since the last call.
            end: Rows that are wanted.
        """
        if self._held[self._turn][0] != layer:
            self._turn = 1 - self._turn
            if self._stream is not None and self._arrived is not None:
                torch.cuda.current_stream().wait_event(self._arrived)
        buffer, (held, rows) = self._buffers[self._turn], self._held[self._turn]
        first = min(rows, written) if held == layer else 0
        if first < end:
            buffer[first:end].copy_(self._keys[layer][first:end], non_blocking=True)
        self._held[self._turn] = (layer, max(end, first))
        # A prefill writes the last layer's keys and reads none of them.
        self._fetch(layer + 1 if layer + 2 < len(self._keys) else 0, written)
        return buffer

    def _fetch(self, layer: int, end: int) -> None:
        """Begins to copy rows [0, end) of a layer into the other buffer."""
        if self._stream is None or self._arrived is None or self._held[1 - self._turn][0] == layer:
            return
        used = torch.cuda.Event()  # type: ignore[no-untyped-call]
        used.record()  # the other buffer's readers come before this
        self._stream.wait_event(used)
        with torch.cuda.stream(self._stream):
            self._buffers[1 - self._turn][:end].copy_(self._keys[layer][:end], non_blocking=True)
            self._arrived.record()
        self._held[1 - self._turn] = (layer, end)
