"""Whether the K and V of a prompt fit in memory, asked before anything long is begun."""

from __future__ import annotations

from tsdoc.errors import ResourceError, TsdocError
from tsdoc.kernels.devices import Device, device_bytes
from tsdoc.store.key import KVShape
from tsdoc.terminal import format_bytes

ROOM = 512  # tokens of question and answer behind the prompt
MEMORY_SHARE = 0.8  # of the machine's free memory that K and V may take


def check_kv_memory(
    num_tokens: int,
    shape: KVShape,
    device: Device,
    *,
    hint: str,
    cause: TsdocError | None = None,
) -> None:
    """Refuses a prompt of `num_tokens` whose K and V this machine cannot hold.

    A GPU's own memory counts beside the machine's, so of a GPU this is only a first look: what its
    backend plans is exact.

    Args:
        num_tokens: Of the prompt; question and answer get room besides.
        shape: Of one token's K and V.
        device: Where the engine runs.
        hint: What the user can do.
        cause: Why they are to be in memory at all, where that was not the user's wish.

    Raises:
        ResourceError: they do not fit, or leave too little free.
    """
    import psutil

    needed = shape.token_bytes * (num_tokens + ROOM)
    on_host, on_device = psutil.virtual_memory().available, device_bytes(device)
    if needed <= on_host * MEMORY_SHARE + on_device:
        return
    because = f"{cause.message}, and " if cause else ""
    raise ResourceError(
        f"{because}K and V of {num_tokens:,} tokens need {format_bytes(needed)} of memory, with "
        f"{format_bytes(on_host + on_device)} free",
        where=cause.where if cause else None,
        hint=hint,
    ) from cause
