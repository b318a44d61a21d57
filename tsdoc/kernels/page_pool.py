"""K and V of one prompt: pages of 256 tokens behind a page table, on the device or on the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tsdoc.errors import ResourceError
from tsdoc.kernels.host_pool import PAGE_SIZE, KeyStage, host_tensor


class PagePool:
    """One K and one V tensor per layer, [num_slots, num_kv_heads, head_dim].

    Attributes:
        keys: Per layer, without RoPE.
        values: Per layer.
        page_table: [num_pages] int32 on the device, logical to physical page.
        unchanged: Positions [0, unchanged) hold what they held when it was last set; the index,
            which is made from keys, sets it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._row = (num_kv_heads, head_dim)
        self._dtype = dtype
        self._device = device
        self.keys = [torch.empty(0, *self._row, dtype=dtype, device=device)] * num_layers
        self.values = list(self.keys)
        self._pages: list[int] = []
        self.page_table = torch.empty(0, dtype=torch.int32, device=device)
        self._resident = 0
        self.unchanged = 0
        self._on_host = False
        self._stage: KeyStage | None = None

    @property
    def resident(self) -> int:
        """Positions [0, resident) hold the prompt's K and V; what lies behind may be rewritten."""
        return self._resident

    @resident.setter
    def resident(self, end: int) -> None:
        if end < self._resident and self._stage is not None:
            self._stage.forget()
        self._resident = end
        self.unchanged = min(self.unchanged, end)

    @property
    def on_host(self) -> bool:
        """Whether K and V are in host memory, which the device reads over the bus."""
        return self._on_host

    def move_to_host(self) -> None:
        """Keeps K and V in host memory from now on; what is held is given up."""
        self._on_host = True
        self._stage = None
        self.keys = [self._rows(0)] * len(self.keys)
        self.values = list(self.keys)
        self.place([])
        self.resident = 0

    def keys_to_score(self, layer: int, written: int, end: int) -> torch.Tensor:
        """Keys of a layer for a kernel that reads all of them, [num_slots, …] on the device.

        Args:
            layer: Which.
            written: Positions from here on may have been written since the last call.
            end: Position after the last that is read.
        """
        if not self._on_host:
            return self.keys[layer]
        if self._stage is None:
            self._stage = KeyStage(self.keys, self._device)
        if self._pages != list(range(len(self._pages))):  # rows are not in order: all of them
            written, end = 0, self.capacity
        return self._stage.get(layer, written, end)

    def _rows(self, num_tokens: int) -> torch.Tensor:
        if self._on_host:
            return host_tensor((num_tokens, *self._row), self._dtype, self._device)
        return torch.empty(num_tokens, *self._row, dtype=self._dtype, device=self._device)

    @property
    def capacity(self) -> int:
        """Positions there is room for."""
        return len(self._pages) * PAGE_SIZE

    @property
    def device_bytes(self) -> int:
        """Device memory that is held, and given back where the pool grows."""
        if not self._on_host:
            return self.bytes_for(self.capacity)
        return self.stage_bytes(self.capacity) if self._stage is not None else 0

    def stage_bytes(self, num_tokens: int) -> int:
        """Device memory that a prompt of so many tokens in host memory takes to be scored."""
        return self.bytes_for(num_tokens) // len(self.keys)

    def bytes_for(self, num_tokens: int) -> int:
        """Memory that K and V of so many tokens take."""
        heads, head_dim = self._row
        rows = -(-num_tokens // PAGE_SIZE) * PAGE_SIZE
        return 2 * len(self.keys) * rows * heads * head_dim * self._dtype.itemsize

    def grow(self, num_tokens: int) -> None:
        """Makes room for positions [0, num_tokens); what is there stays.

        Raises:
            ResourceError: the device has too little free memory.
        """
        num_pages = -(-num_tokens // PAGE_SIZE)
        if num_pages <= len(self._pages):
            return
        self._stage = None
        try:
            for layers in (self.keys, self.values):
                for layer, old in enumerate(layers):
                    new = self._rows(num_pages * PAGE_SIZE)
                    new[: old.shape[0]] = old
                    layers[layer] = new
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"K and V of {num_tokens:,} tokens need {self.bytes_for(num_tokens) / 1e9:.1f} GB "
                "of device memory, and there is less",
                hint="Read less (--pages, --section, --exclude) or choose a smaller model.",
            ) from error
        self.place(self._pages + list(range(len(self._pages), num_pages)))

    def place(self, pages: list[int]) -> None:
        """Sets the page table; every physical page is used once."""
        self._pages = pages
        self.page_table = torch.tensor(pages, dtype=torch.int32).to(self._device)

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Splits [start, end) into (first, last, slot of first) of consecutive slots."""
        while start < end:
            page = start // PAGE_SIZE
            stop = page + 1
            while stop * PAGE_SIZE < end and self._pages[stop] == self._pages[stop - 1] + 1:
                stop += 1
            last = min(end, stop * PAGE_SIZE)
            yield start, last, self._pages[page] * PAGE_SIZE + start % PAGE_SIZE
            start = last
