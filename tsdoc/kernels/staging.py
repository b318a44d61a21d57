"""Pinned buffers through which one thread moves bytes between host memory and a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

STAGING_BYTES = 16 << 20
NUM_BUFFERS = 2


class Staging:
    """A thread's stream and two buffers: one is filled while the other's bytes travel.

    Args:
        device: What is at the other end; a CPU has no stream, and nothing is pinned then.

    Attributes:
        turn: Which buffer was taken last.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        # torch gives streams and events no types.
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_BUFFERS)]
        self._sent: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self.turn = 0

    def take(self) -> int:
        """Takes the next buffer, as soon as what left it has arrived; returns its number."""
        self.turn = (self.turn + 1) % NUM_BUFFERS
        sent = self._sent[self.turn]
        if sent is not None:
            sent.synchronize()
        return self.turn

    def bytes(self, count: int) -> torch.Tensor:
        """The first `count` bytes of the buffer that was taken, which grows if it has to."""
        if len(self._buffers[self.turn]) < count:
            self._buffers[self.turn] = torch.empty(
                max(STAGING_BYTES, count), dtype=torch.uint8, pin_memory=self._on_cuda
            )
        return self._buffers[self.turn][:count]

    def sent(self) -> None:
        """Notes that the buffer is in use by all copies begun so far on the thread's stream."""
        if self._on_cuda:
            sent = self._sent[self.turn]
            if sent is None:
                sent = self._sent[self.turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            sent.record()

    def wait(self) -> None:
        """Returns once all copies have arrived."""
        if self._stream is not None:
            self._stream.synchronize()

    def stream(self) -> AbstractContextManager[object]:
        """Makes the thread's stream the current one."""
        if self._stream is None:
            return nullcontext()
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context
