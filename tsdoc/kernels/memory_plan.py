"""What a device's memory will hold, planned before anything is computed; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

WORK_BYTES = 5 << 30  # activations of a block, votes, gathered rows, what libraries take
HOST_WORK_BYTES = 3 << 30  # the same where memory is short, with rows kept for decode steps


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes that a prompt needs of a device with memory of its own.

    Attributes:
        total_bytes: What may be used of the device's memory.
        taken_bytes: What weights and others have of that.
        kv_bytes: K and V of all layers.
        on_host: Whether these lie in the machine's own memory instead.
        stage_bytes: Keys of two layers, while a prefill scores them; 0 unless `on_host`.
        index_bytes: The key index of all layers, as far as it is not there yet; 0 unless `on_host`.
        work_bytes: Activations and the like.
    """

    total_bytes: int
    taken_bytes: int
    kv_bytes: int
    on_host: bool
    stage_bytes: int
    index_bytes: int
    work_bytes: int

    @property
    def needed_bytes(self) -> int:
        """All of it that lies on the device."""
        on_device = 0 if self.on_host else self.kv_bytes
        beside = self.stage_bytes + self.index_bytes + self.work_bytes
        return self.taken_bytes + on_device + beside

    @property
    def fits(self) -> bool:
        """Whether the device has room for that."""
        return self.needed_bytes <= self.total_bytes


def plan_memory(
    *,
    total_bytes: int,
    free_bytes: int,
    kv_bytes: int,
    stage_bytes: int,
    index_bytes: int,
    may_move: bool,
    is_moved: bool = False,
) -> MemoryPlan:
    """Keeps K and V on the device where they fit, else in the machine's memory if they may.

    Args:
        total_bytes: Device memory that may be used.
        free_bytes: Of that, what is free, or held by K and V or their stage.
        kv_bytes: K and V of all layers.
        stage_bytes: Keys of two layers.
        index_bytes: The key index of all layers, as far as it is not there yet.
        may_move: Whether K and V may lie in the machine's memory.
        is_moved: Whether they do already, and stay.
    """
    taken = total_bytes - free_bytes
    on_host = is_moved or (may_move and kv_bytes + WORK_BYTES > free_bytes)
    return MemoryPlan(
        total_bytes=total_bytes,
        taken_bytes=taken,
        kv_bytes=kv_bytes,
        on_host=on_host,
        stage_bytes=stage_bytes if on_host else 0,
        index_bytes=index_bytes if on_host else 0,
        work_bytes=HOST_WORK_BYTES if on_host else WORK_BYTES,
    )
