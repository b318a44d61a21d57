"""Copies weights from host memory to a device, through pinned buffers and on several threads.

From memory that is not pinned the driver copies on the calling thread alone, which also has to read
what is mapped there: about an eighth of what the bus does.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

from tsdoc.kernels.staging import STAGING_BYTES, Staging

NUM_WORKERS = 8


class Upload:
    """Fills tensors on a device; what was begun has arrived once the `with` block is left.

    Args:
        device: Where they go.
        dtype: What they are made there; they travel as they are stored.

    Raises:
        RuntimeError: from the block's end: what a copy raised.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="tsdoc-upload")
        self._local = threading.local()
        self._stagings: list[Staging] = []
        self._tasks: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                for task in self._tasks:
                    task.result()
        finally:
            self._workers.shutdown(cancel_futures=True)
            for staging in self._stagings:
                staging.wait()

    def stack(self, *parts: torch.Tensor) -> torch.Tensor:
        """Begins to fill a tensor with the rows of all parts, one behind the other.

        Args:
            parts: [num_rows, …] each, alike but for their rows. What is on a GPU already is there
                at once, and a single one of the right type is not copied.
        """
        if parts[0].is_cuda:
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self._device, self._dtype)
        lengths = [len(part) for part in parts]
        whole = torch.empty(
            sum(lengths), *parts[0].shape[1:], dtype=self._dtype, device=self._device
        )
        ready = None
        if whole.is_cuda:  # its memory may still be in use by what the current stream does
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
            ready.record()
        for part, place in zip(parts, torch.split(whole, lengths), strict=True):
            step = max(1, STAGING_BYTES // part[:1].nbytes)
            for rows, there in zip(torch.split(part, step), torch.split(place, step), strict=True):
                self._tasks.append(self._workers.submit(self._send, rows, there, ready))
        return whole

    def _send(
        self, rows: torch.Tensor, there: torch.Tensor, ready: torch.cuda.Event | None
    ) -> None:
        staging = self._staging
        with staging.stream():
            if ready is not None:
                ready.wait()
            staging.take()
            host = staging.bytes(rows.nbytes).view(rows.dtype).view(rows.shape)
            host.copy_(rows)
            # What has to be converted is converted there: this thread has enough to do.
            same = rows.dtype == there.dtype
            there.copy_(
                host if same else host.to(self._device, non_blocking=True), non_blocking=True
            )
            staging.sent()

    @property
    def _staging(self) -> Staging:
        """The calling thread's."""
        if not hasattr(self._local, "staging"):
            torch.set_num_threads(1)  # of this thread
            self._local.staging = Staging(self._device)
            self._stagings.append(self._local.staging)
        staging: Staging = self._local.staging
        return staging
