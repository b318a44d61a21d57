"""What a device's memory will hold, from sizes alone."""

from __future__ import annotations

import dataclasses

from tsdoc.kernels.memory_plan import HOST_WORK_BYTES, WORK_BYTES, MemoryPlan, plan_memory

GB = 10**9


def plan(total: int, free: int, **changes: bool) -> MemoryPlan:
    """1,048,576 tokens of Qwen2-7B's shape, weights in bfloat16 taken from `total`."""
    options: dict[str, bool] = {"may_move": True, **changes}
    return plan_memory(
        total_bytes=total,
        free_bytes=free,
        kv_bytes=60 * GB,
        stage_bytes=2_150_000_000,
        index_bytes=1_880_000_000,
        **options,
    )


def test_what_fits_stays_on_the_device() -> None:
    resident = plan(140 * GB, 125 * GB)
    assert not resident.on_host
    assert resident.fits
    assert resident.needed_bytes == 15 * GB + 60 * GB + WORK_BYTES
    assert (resident.stage_bytes, resident.index_bytes) == (0, 0)


def test_with_a_cap_of_24_gb_a_million_tokens_go_to_the_host_and_fit() -> None:
    capped = plan(24 * GB, 24 * GB - 15_200_000_000)
    assert capped.on_host
    assert capped.fits
    beside = 2_150_000_000 + 1_880_000_000 + HOST_WORK_BYTES
    assert capped.needed_bytes == 15_200_000_000 + beside <= 24 * GB


def test_what_is_beside_k_and_v_has_to_fit_too() -> None:
    assert not plan(20 * GB, 4_800_000_000).fits


def test_without_a_limit_nothing_moves_and_a_prompt_that_is_too_long_does_not_fit() -> None:
    refused = plan(80 * GB, 64 * GB, may_move=False)
    assert not refused.on_host
    assert not refused.fits


def test_what_has_moved_stays_where_it_is() -> None:
    assert plan(140 * GB, 125 * GB, is_moved=True).on_host


def test_the_edge_is_counted_in_bytes() -> None:
    edge = plan(100 * GB, 60 * GB + WORK_BYTES)
    assert not edge.on_host
    assert edge.fits
    beyond = plan(100 * GB, 60 * GB + WORK_BYTES - 1)
    assert beyond.on_host
    assert not dataclasses.replace(beyond, on_host=False, work_bytes=WORK_BYTES).fits
