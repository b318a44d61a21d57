"""K and V of one haystack in plain tensors on any device, for the policies that do not ship."""

from __future__ import annotations

import torch

from tsdoc.errors import ResourceError
from tsdoc.kernels.host_pool import PAGE_SIZE
from tsdoc.models.config import ModelConfig

SPARE = 512  # tokens of room behind a haystack


class PolicyCache:
    """Keys, without RoPE, and values: per layer [capacity, num_kv_heads, head_dim], whole pages.

    Args:
        config: Shape of the model.
        kv_dtype: Type they are kept in.
        compute_dtype: Type they are read in.
        device: Where they lie.

    Attributes:
        sealed: Length of the haystack once it is prefilled; None while it is.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        kv_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self.sealed: int | None = None
        self._compute_dtype = compute_dtype
        empty = torch.empty(0, config.num_kv_heads, config.head_dim, dtype=kv_dtype, device=device)
        self._keys, self._values = [empty] * config.num_layers, [empty] * config.num_layers

    def reserve(self, num_tokens: int) -> None:
        """Makes room for positions [0, num_tokens); what is there stays.

        Raises:
            ResourceError: the device has too little free memory.
        """
        if num_tokens <= len(self._keys[0]):
            return
        capacity = -(-(num_tokens + SPARE) // PAGE_SIZE) * PAGE_SIZE
        try:
            for rows in (self._keys, self._values):
                for layer, old in enumerate(rows):
                    new = old.new_empty(capacity, *old.shape[1:])
                    new[: len(old)] = old
                    rows[layer] = new
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"K and V of {num_tokens:,} tokens do not fit the device's memory",
                hint="Choose shorter --lengths or fewer policies.",
            ) from error

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores `k` and `v` [num_tokens, num_kv_heads, head_dim], without RoPE."""
        rows = slice(start, start + k.shape[0])
        self._keys[layer][rows], self._values[layer][rows] = k, v

    def keys(self, layer: int, start: int, end: int) -> torch.Tensor:
        """Keys [num_kv_heads, end - start, head_dim] in the compute dtype."""
        return self._keys[layer][start:end].transpose(0, 1).to(self._compute_dtype)

    def values(self, layer: int, start: int, end: int) -> torch.Tensor:
        """Values, same shape."""
        return self._values[layer][start:end].transpose(0, 1).to(self._compute_dtype)

    def slots(self, layer: int) -> torch.Tensor:
        """All keys as they are kept; those that were not written yet may be anything."""
        return self._keys[layer]

    def gather(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at `positions` [num_kv_heads, n]: each [num_kv_heads, n, head_dim]."""
        head = torch.arange(positions.shape[0], device=self.device).unsqueeze(1)
        k, v = self._keys[layer][positions, head], self._values[layer][positions, head]
        return k.to(self._compute_dtype), v.to(self._compute_dtype)
