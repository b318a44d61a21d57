"""What one thread that moves K and V has of its own: staging buffers, and rows in them."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from tsdoc.kernels.kv import KVArray
from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.staging import NUM_BUFFERS, STAGING_BYTES, Staging


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRows:
    """Rows on their way; made once, as every view asks for the interpreter's lock.

    Attributes:
        host: K and V of each token side by side, [num_tokens, 2, num_kv_heads, head_dim].
        array: The same memory as pieces have it.
        there: The same rows where the pool is; `host` itself if that is host memory.
        keys: Of `there`, [num_tokens, num_kv_heads, head_dim].
        values: Likewise.
    """

    host: torch.Tensor
    array: KVArray
    there: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class Lane:
    """One thread's stream and its buffers.

    Besides two pinned ones there is one on the device: there K and V of a token still lie side by
    side.

    Args:
        pool: Whose rows travel.
        device: The pool's.
    """

    def __init__(self, pool: PagePool, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._staging = Staging(device)
        self._there = torch.empty(0, dtype=torch.uint8)
        self._rows: list[LaneRows | None] = [None] * NUM_BUFFERS

    def stage(self, num_tokens: int) -> LaneRows:
        """The next rows, free to be filled."""
        turn = self._staging.take()
        rows = self._rows[turn]
        moved = rows is not None and (rows.there is rows.host) != self._pool.on_host
        if rows is None or moved or len(rows.array) != num_tokens:
            rows = self._rows[turn] = self._cut(num_tokens)
        return rows

    def send(self, rows: LaneRows) -> None:
        """Begins to copy rows that were staged last to where the pool is."""
        if rows.there is rows.host:
            return
        rows.there.copy_(rows.host, non_blocking=self._on_cuda)
        self._staging.sent()

    def fetch(self, rows: LaneRows) -> None:
        """Returns once rows have arrived from where the pool is."""
        if rows.there is not rows.host:
            rows.host.copy_(rows.there, non_blocking=self._on_cuda)
        self.wait()

    def wait(self) -> None:
        """Returns once all copies have arrived."""
        self._staging.wait()

    def stream(self) -> AbstractContextManager[object]:
        """Makes the thread's stream the current one."""
        return self._staging.stream()

    def _cut(self, num_tokens: int) -> LaneRows:
        """Rows in the buffer whose turn it is."""
        like = self._pool.keys[0]
        shape = (num_tokens, 2, *like.shape[1:])
        num_bytes = math.prod(shape) * like.dtype.itemsize
        host = self._staging.bytes(num_bytes).view(like.dtype).view(shape)
        there = host
        if not self._pool.on_host:
            if len(self._there) < num_bytes:
                size = max(STAGING_BYTES, num_bytes)
                self._there = torch.empty(size, dtype=torch.uint8, device=self._device)
            there = self._there[:num_bytes].view(like.dtype).view(shape)
        return LaneRows(
            host=host, array=_as_array(host), there=there, keys=there[:, 0], values=there[:, 1]
        )


def _as_array(rows: torch.Tensor) -> KVArray:
    """The same memory as pieces have it: bfloat16 as uint16 bit patterns."""
    bits = rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows
    array: KVArray = bits.numpy()
    return array
