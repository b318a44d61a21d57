"""K and V of one haystack in plain tensors on any device, for the policies that do not ship."""

from __future__ import annotations

import torch

from tsdoc.errors import ResourceError
from tsdoc.models.config import ModelConfig

SPARE = 512  # tokens of room behind a haystack


class PolicyCache:
    """Keys, without RoPE, and values: per layer [num_kv_heads, capacity, head_dim].

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
        empty = torch.empty(config.num_kv_heads, 0, config.head_dim, dtype=kv_dtype, device=device)
        self._keys, self._values = [empty] * config.num_layers, [empty] * config.num_layers

    def reserve(self, num_tokens: int) -> None:
        """Makes room for positions [0, num_tokens); what is there stays.

        Raises:
            ResourceError: the device has too little free memory.
        """
        if num_tokens <= self._keys[0].shape[1]:
            return
        try:
            for rows in (self._keys, self._values):
                for layer, old in enumerate(rows):
                    new = old.new_empty(old.shape[0], num_tokens + SPARE, old.shape[2])
                    new[:, : old.shape[1]] = old
                    rows[layer] = new
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"K and V of {num_tokens:,} tokens do not fit the device's memory",
                hint="Choose shorter --lengths or fewer policies.",
            ) from error

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores `k` and `v` [num_tokens, num_kv_heads, head_dim], without RoPE."""
        rows = slice(start, start + k.shape[0])
        self._keys[layer][:, rows] = k.transpose(0, 1)
        self._values[layer][:, rows] = v.transpose(0, 1)

    def keys(self, layer: int, start: int, end: int) -> torch.Tensor:
        """Keys [num_kv_heads, end - start, head_dim] in the compute dtype."""
        return self._keys[layer][:, start:end].to(self._compute_dtype)

    def values(self, layer: int, start: int, end: int) -> torch.Tensor:
        """Values, same shape."""
        return self._values[layer][:, start:end].to(self._compute_dtype)

    def gather(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at `positions` [num_kv_heads, n]: each [num_kv_heads, n, head_dim]."""
        head = torch.arange(positions.shape[0], device=self.device).unsqueeze(1)
        k, v = self._keys[layer][head, positions], self._values[layer][head, positions]
        return k.to(self._compute_dtype), v.to(self._compute_dtype)
