"""The key index on a CUDA device: built there from the keys in the pool, extended by an answer."""

from __future__ import annotations

import torch

from tsdoc.errors import ResourceError
from tsdoc.kernels.index import (
    HALF,
    NO_KEY,
    PAGE,
    RANK,
    IndexBasis,
    QueryMoments,
    build,
    epoch_end,
    find_basis,
    sample_positions,
)
from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.triton.store import slots_of

BUILD_STEP = 65_536  # keys encoded at a time


class DeviceIndex:
    """Codes and bases of all layers for what is in `pool`.

    Buffers stay where they are while the pool keeps its size: graphs hold their addresses.

    Attributes:
        codes: Per layer [num_kv_heads, num_pages · 128, RANK] uint8, by position.
        axes: Per layer [num_kv_heads, head_dim, RANK] float32.
        centres: Per layer [num_kv_heads, head_dim] float32.
        covered: Positions [0, covered) are in it.
        moments: The model's; None if every direction is asked about alike.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.moments: QueryMoments | None = None
        self._epoch = 0
        self._bases: list[IndexBasis] = []
        self.codes: list[torch.Tensor] = []
        self.axes: list[torch.Tensor] = []
        self.centres: list[torch.Tensor] = []
        self.covered = 0

    def bytes_for(self, num_tokens: int) -> int:
        """Device memory of an index over so many tokens."""
        num_kv = self._pool.keys[0].shape[1]
        pages = -(-num_tokens // PAGE)
        return len(self._pool.keys) * num_kv * pages * HALF * RANK

    @property
    def held_bytes(self) -> int:
        """Device memory that its codes have, and give back where it grows."""
        return sum(codes.numel() for codes in self.codes)

    def cover(self, end: int) -> None:
        """Makes [0, end) part of the index; what changed in the pool meanwhile is encoded anew.

        Raises:
            ResourceError: the device has too little free memory.
        """
        pool = self._pool
        self._make_room()
        self.covered = min(self.covered, pool.unchanged)
        pool.unchanged = pool.capacity
        epoch = epoch_end(end)
        if epoch != self._epoch or self.covered < epoch:
            self._find_bases(end)
            self._epoch, self.covered = epoch, 0
        if self.covered >= end:
            return
        start = self.covered - self.covered % PAGE
        for layer, codes in enumerate(self.codes):
            self._encode(layer, codes, start, end)
        self.covered = end

    def _make_room(self) -> None:
        pool = self._pool
        num_kv, head_dim = pool.keys[0].shape[1:]
        rows = pool.capacity // 2
        if self.codes and self.codes[0].shape[1] == rows:
            return
        self.codes = []  # frees the old ones first
        device = pool.page_table.device
        layers = range(len(pool.keys))
        try:
            self.codes = [
                torch.full((num_kv, rows, RANK), NO_KEY, dtype=torch.uint8, device=device)
                for _ in layers
            ]
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"the key index needs {self.bytes_for(pool.capacity) / 1e9:.1f} GB of device "
                "memory, and there is less",
                hint="Do without it: --set index=none.",
            ) from error
        self.axes = [torch.empty(num_kv, head_dim, RANK, device=device) for _ in layers]
        self.centres = [torch.empty(num_kv, head_dim, device=device) for _ in layers]
        self.covered = self._epoch = 0

    def _find_bases(self, end: int) -> None:
        pool = self._pool
        positions = sample_positions(end).to(pool.page_table.device)
        slots = slots_of(pool.page_table, positions)
        device = pool.page_table.device
        slots = slots.to(pool.keys[0].device)
        self._bases = [
            find_basis(keys[slots].to(device), self.moments and self.moments(layer))
            for layer, keys in enumerate(pool.keys)
        ]
        for basis, axes, centre in zip(self._bases, self.axes, self.centres, strict=True):
            axes.copy_(basis.axes)
            centre.copy_(basis.centre)

    def _encode(self, layer: int, codes: torch.Tensor, start: int, end: int) -> None:
        pool = self._pool
        keys = pool.keys[layer]

        def read(first: int, last: int) -> torch.Tensor:
            device = pool.page_table.device
            runs = [keys[slot : slot + b - a].to(device) for a, b, slot in pool.runs(first, last)]
            return runs[0] if len(runs) == 1 else torch.cat(runs)

        build(read, self._bases[layer], codes, start, end, step=BUILD_STEP)
