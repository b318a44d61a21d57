"""K and V of one prompt in device memory: pages of 256 tokens behind a page table."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tsdoc.errors import ResourceError

PAGE_SIZE = 256


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

    @property
    def resident(self) -> int:
        """Positions [0, resident) hold the prompt's K and V; what lies behind may be rewritten."""
        return self._resident

    @resident.setter
    def resident(self, end: int) -> None:
        self._resident = end
        self.unchanged = min(self.unchanged, end)

    @property
    def capacity(self) -> int:
        """Positions there is room for."""
        return len(self._pages) * PAGE_SIZE

    def bytes_for(self, num_tokens: int) -> int:
        """Device memory that K and V of so many tokens take."""
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
        try:
            for layers in (self.keys, self.values):
                for layer, old in enumerate(layers):
                    new = old.new_empty(num_pages * PAGE_SIZE, *self._row)
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
