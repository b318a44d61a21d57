"""Whether the K and V of a prompt fit in memory, asked before anything long is begun."""

from __future__ import annotations

from tsdoc.errors import ResourceError
from tsdoc.kernels.devices import Device, device_bytes
from tsdoc.models.config import ModelConfig
from tsdoc.settings import Settings
from tsdoc.store.key import KVShape

ROOM = 512  # for question and answer behind the prompt
MEMORY_SHARE = 0.8


def kv_shape(config: ModelConfig, settings: Settings) -> KVShape:
    """K and V of one token."""
    return KVShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        kv_dtype=settings.engine.kv_dtype,
    )


def check_memory(num_tokens: int, config: ModelConfig, settings: Settings, device: Device) -> None:
    """Refuses a prompt of `num_tokens` whose K and V this machine cannot hold.

    A GPU's own memory counts beside the machine's, so of a GPU this is only a first look: what its
    backend plans is exact.

    Raises:
        ResourceError: they do not fit, or leave nothing free.
    """
    import psutil

    shape = kv_shape(config, settings)
    needed = 2 * shape.num_layers * shape.row_bytes * (num_tokens + ROOM)
    on_host, on_device = psutil.virtual_memory().available, device_bytes(device)
    if needed > on_host * MEMORY_SHARE + on_device:
        raise ResourceError(
            f"K and V of {num_tokens:,} tokens need {needed / 1e9:.1f} GB of memory, and "
            f"{(on_host + on_device) / 1e9:.1f} GB are free",
            hint="Profile fewer --tokens or a smaller model.",
        )
