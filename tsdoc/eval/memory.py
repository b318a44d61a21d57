"""Whether the K and V of a haystack fit in memory, asked before its text is made."""

from __future__ import annotations

from tsdoc.errors import ResourceError
from tsdoc.kernels.devices import Device, device_bytes
from tsdoc.models.config import ModelConfig

MEMORY_SHARE = 0.8  # of the free memory that K and V may take


def check_memory(num_tokens: int, config: ModelConfig, kv_dtype: str, device: Device) -> None:
    """Refuses a haystack whose K and V this machine cannot hold.

    A GPU's own memory counts beside the machine's, so of a GPU this is only a first look: its
    backend checks what it takes.

    Raises:
        ResourceError: they do not fit.
    """
    import psutil

    needed = num_tokens * config.kv_bytes_per_token(4 if kv_dtype == "float32" else 2)
    on_host, on_device = psutil.virtual_memory().available, device_bytes(device)
    if needed > on_host * MEMORY_SHARE + on_device:
        raise ResourceError(
            f"K and V of {num_tokens:,} tokens take {needed / 1e9:,.1f} GB of memory, and "
            f"{(on_host + on_device) / 1e9:.1f} GB are free",
            hint="Choose shorter --lengths or a smaller --model.",
        )
