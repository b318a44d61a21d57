"""The `triton` backend: one CUDA device, its memory, and the caches that live there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tsdoc.errors import ResourceError
from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.memory_plan import WORK_BYTES, MemoryPlan, plan_memory
from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.ranks import Ranks, SoloRanks
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.transfer import Transfer
from tsdoc.kernels.triton_answers import DecodeStarter
from tsdoc.kernels.triton_cache import TritonCache
from tsdoc.kernels.triton_index import DeviceIndex
from tsdoc.kernels.triton_parts import CacheParts
from tsdoc.models.config import ModelConfig

HOST_SHARE = 0.8  # of the host's free memory that may be pinned
SPARE_TOKENS = 4096  # room for questions and answers behind a prompt


class TritonBackend:
    """See `Backend`. Holds one prompt at a time; what the next one shares with it stays.

    Args:
        config: Shape of the model.
        kv_dtype: Type of the pool, "bfloat16" or "float32".
        compute_dtype: Type of queries and matrix products.
        device: A CUDA device; the CPU where kernels run in Triton's interpreter.
        memory_bytes: Device memory to use at most; None is all there is.
        ranks: Those that have the model's other heads; `config` is then this rank's.
    """

    save_ahead = 2

    def __init__(
        self,
        config: ModelConfig,
        *,
        kv_dtype: str,
        compute_dtype: torch.dtype,
        device: torch.device,
        memory_bytes: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.device = device
        self._memory_bytes = memory_bytes
        if memory_bytes is not None and device.type == "cuda":
            limit_memory(memory_bytes, device)
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
            ranks=ranks or SoloRanks(),
        )

    def cache(
        self,
        pieces: Sequence[KVPiece],
        rope: RopeTable,
        config: SelectionConfig,
        index: IndexWatch | None = None,
    ) -> TritonCache:
        """See `Backend.cache`."""
        self._parts.transfer.wait_ready()
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

        With a limit of device memory, K and V that do not fit beside the weights go to the host.

        Raises:
            ResourceError: they do not fit there either.
        """
        if self.device.type != "cuda" and self._memory_bytes is None:
            return
        pool = self.pool
        plan = self._plan(num_tokens)
        if plan.fits and not plan.on_host:
            return
        if plan.fits and fits_host(plan.kv_bytes):
            if not pool.on_host:
                pool.move_to_host()
                torch.cuda.empty_cache()
            return
        free = plan.total_bytes - plan.taken_bytes
        per_token = pool.bytes_for(256) / 256
        most = max(0, int((free - WORK_BYTES) / per_token) - SPARE_TOKENS)
        raise ResourceError(
            f"K and V of {num_tokens:,} tokens need {plan.kv_bytes / 1e9:.1f} GB of device memory "
            f"and the work {WORK_BYTES / 1e9:.1f} GB more; {free / 1e9:.1f} of "
            f"{plan.total_bytes / 1e9:.1f} GB are free",
            hint=f"About {most:,} tokens fit. Read less (--pages, --section, --exclude), choose a "
            "smaller model, keep K and V in the machine's memory (--set device_memory=BYTES), or "
            "use --device cpu.",
        )

    def memory_plan(self, num_tokens: int) -> MemoryPlan | None:
        """See `Planning`: with a limit of device memory."""
        return None if self._memory_bytes is None else self._plan(num_tokens)

    def _plan(self, num_tokens: int) -> MemoryPlan:
        """Where K and V of so many tokens go, with room for questions and answers."""
        pool, room = self.pool, num_tokens + SPARE_TOKENS
        free, total = free_memory(self.device, self._memory_bytes)
        index = self._parts.index
        return plan_memory(
            total_bytes=total,
            free_bytes=free + pool.device_bytes,
            kv_bytes=pool.bytes_for(room),
            stage_bytes=pool.stage_bytes(room),
            index_bytes=max(0, index.bytes_for(room) - index.held_bytes),
            may_move=self._memory_bytes is not None,
            is_moved=pool.on_host,
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


def free_memory(device: torch.device, limit: int | None) -> tuple[int, int]:
    """Bytes of device memory that may still be taken, and bytes there are, both up to `limit`."""
    free, total = torch.cuda.mem_get_info(device)
    used = torch.cuda.memory_allocated(device)
    free += torch.cuda.memory_reserved(device) - used
    if limit is not None:
        free, total = min(free, limit - used), min(total, limit)
    return free, total


def limit_memory(num_bytes: int, device: torch.device) -> None:
    """Keeps this process from taking more device memory."""
    index = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(index).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), index)


def fits_host(num_bytes: int) -> bool:
    """Whether so much host memory can be taken for good."""
    import psutil

    return num_bytes <= HOST_SHARE * psutil.virtual_memory().available


def check_free(num_bytes: int, name: str, limit: int | None = None) -> None:
    """Checks that weights of `num_bytes` fit on the device, or into `limit` bytes of it.

    Raises:
        ResourceError: they do not.
    """
    free, total = free_memory(torch.device("cuda"), limit)
    if num_bytes + WORK_BYTES > free:
        raise ResourceError(
            f"the weights need {num_bytes / 1e9:.1f} GB of device memory and the work "
            f"{WORK_BYTES / 1e9:.1f} GB more; {free / 1e9:.1f} of {total / 1e9:.1f} GB are free",
            where=name,
            hint="Choose a smaller model (`tsdoc models list`) or --device cpu.",
        )
