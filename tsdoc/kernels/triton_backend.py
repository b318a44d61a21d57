"""The `triton` backend: one CUDA device, its memory, and the caches that live there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tsdoc.errors import ResourceError
from tsdoc.kernels.index import IndexUse
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.transfer import Transfer
from tsdoc.kernels.triton_cache import TritonCache
from tsdoc.kernels.triton_decode import DecodeStarter
from tsdoc.kernels.triton_index import DeviceIndex
from tsdoc.kernels.triton_parts import CacheParts
from tsdoc.models.config import ModelConfig

WORK_BYTES = 5 << 30  # activations of a block, votes, gathered rows, what libraries take
SPARE_TOKENS = 4096  # room for questions and answers behind a prompt


class TritonBackend:
    """See `Backend`. Holds one prompt at a time; what the next one shares with it stays.

    Args:
        config: Shape of the model.
        kv_dtype: Type of the pool, "bfloat16" or "float32".
        compute_dtype: Type of queries and matrix products.
        device: A CUDA device; the CPU where kernels run in Triton's interpreter.
    """

    save_ahead = 2

    def __init__(
        self,
        config: ModelConfig,
        *,
        kv_dtype: str,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self._pieces: list[tuple[object, int]] = []  # what the pool belongs to, with their ends
        self.pool = PagePool(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32 if kv_dtype == "float32" else torch.bfloat16,
            device=device,
        )
        on_cuda = device.type == "cuda"
        sms = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 2
        self._parts = CacheParts(
            pool=self.pool,
            transfer=Transfer(self.pool, device),
            compute_dtype=compute_dtype,
            device=device,
            num_sms=sms,
            decodes=DecodeStarter(),
            index=DeviceIndex(self.pool),
        )

    def cache(
        self,
        pieces: Sequence[KVPiece],
        rope: RopeTable,
        config: SelectionConfig,
        index: IndexUse | None = None,
    ) -> TritonCache:
        """See `Backend.cache`."""
        end = max(piece.start + piece.capacity for piece in pieces)
        if end > self.pool.capacity:
            self._check_memory(end)
            spare = SPARE_TOKENS if self.device.type == "cuda" else 0
            self.pool.grow(end + spare)
        self.pool.resident = min(self.pool.resident, _shared(self._pieces, pieces))
        self._pieces = [(piece.content, piece.start + piece.capacity) for piece in pieces]
        return TritonCache(self._parts, pieces, rope, config, index)

    def _check_memory(self, num_tokens: int) -> None:
        """Plans before anything is computed, rather than failing in the middle.

        Raises:
            ResourceError: K and V of so many tokens do not fit beside the weights.
        """
        if self.device.type != "cuda":
            return
        free, total = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        held = self.pool.bytes_for(self.pool.capacity)
        needed = self.pool.bytes_for(num_tokens + SPARE_TOKENS) - held
        if needed + WORK_BYTES <= free:
            return
        per_token = self.pool.bytes_for(256) / 256
        most = max(0, int((free + held - WORK_BYTES) / per_token) - SPARE_TOKENS)
        raise ResourceError(
            f"K and V of {num_tokens:,} tokens need {needed / 1e9:.1f} GB of device memory and "
            f"the work {WORK_BYTES / 1e9:.1f} GB more; {free / 1e9:.1f} of {total / 1e9:.1f} GB "
            "are free",
            hint=f"About {most:,} tokens fit. Read less (--pages, --section, --exclude), choose a "
            "smaller model, or use --device cpu.",
        )


def _shared(held: Sequence[tuple[object, int]], pieces: Sequence[KVPiece]) -> int:
    """Positions from 0 on that are the same in the pieces the pool belongs to and in `pieces`."""
    shared = 0
    for (content, held_end), piece in zip(held, pieces, strict=False):
        if content != piece.content or piece.start != shared:
            break
        end = piece.start + piece.capacity
        shared = min(held_end, end)
        if held_end != end:
            break
    return shared


def check_free(num_bytes: int, name: str) -> None:
    """Checks that weights of `num_bytes` fit on the device.

    Raises:
        ResourceError: they do not.
    """
    free, total = torch.cuda.mem_get_info()
    if num_bytes + WORK_BYTES > free:
        raise ResourceError(
            f"the weights need {num_bytes / 1e9:.1f} GB of device memory and the work "
            f"{WORK_BYTES / 1e9:.1f} GB more; {free / 1e9:.1f} of {total / 1e9:.1f} GB are free",
            where=name,
            hint="Choose a smaller model (`tsdoc models list`) or --device cpu.",
        )
