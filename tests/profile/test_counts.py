"""Counted bytes and operations, against sums written out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tests.profile.conftest import SHAPE
from tsdoc.kernels.selection import SelectionConfig, chunk_range
from tsdoc.models.config import from_shape
from tsdoc.profile.counts import (
    Work,
    block_attention,
    block_selection,
    decode_attention,
    decode_linear,
    decode_selection,
    prefill_linear,
    product,
    store_kv,
    traffic,
)
from tsdoc.profile.prefill import block_ranges
from tsdoc.profile.results import Ceilings, percentile
from tsdoc.profile.roofline import make_kernel
from tsdoc.settings import ModelShape

CONFIG = from_shape(ModelShape.model_validate(SHAPE))  # 2 layers, 32 wide, 4/2 heads of 8
SELECTION = SelectionConfig(n_init=16, n_local=32, top_k=64, chunk_size=64)
CPU = traffic("cpu", "float32", "bfloat16")
CUDA = traffic("cuda", "bfloat16", "bfloat16")


def test_a_product_reads_both_sides_and_writes_the_result() -> None:
    assert product(3, 5, 7, 2) == Work((15 + 35 + 21) * 2, 2 * 3 * 5 * 7)


def test_the_last_layer_of_a_prefill_stops_after_k_and_v() -> None:
    qkv, rest = 32 * (4 + 2 * 2) * 8, 32 * 32 + 3 * 32 * 64
    assert prefill_linear(CONFIG, 100, CPU).num_flops == 2 * 100 * (2 * qkv + rest)


def test_a_decode_step_reads_every_weight_once() -> None:
    qkv, rest, head = 32 * 64, 32 * 32 + 3 * 32 * 64, 32 * 128
    work = decode_linear(CONFIG, CUDA)
    weights = 2 * (qkv + rest) + head
    assert work.num_flops == 2 * weights
    assert weights * 2 < work.num_bytes < weights * 2 * 1.2


def test_k_and_v_are_read_as_computed_and_written_as_kept() -> None:
    assert store_kv(CONFIG, 10, CPU).num_bytes == 2 * 10 * 2 * 8 * 2 * (4 + 2)


def test_selection_counts_nothing_but_queries_while_everything_fits() -> None:
    ranges = block_ranges(0, 128, SELECTION)
    work = block_selection(CONFIG, SELECTION, ranges, CPU)
    assert work.num_bytes == 128 * 32 * 4 + 2 * 32 * 4


def test_selection_counts_keys_once_a_pass_scores_and_votes() -> None:
    ranges = block_ranges(512, 640, SELECTION)
    candidates = [512 - 32 - 16, 576 - 32 - 16]
    queries = block_selection(CONFIG, SELECTION, block_ranges(0, 128, SELECTION), CPU)
    work = block_selection(CONFIG, SELECTION, ranges, CPU)
    keys, scores, votes = max(candidates) * 16 * 2, 4 * 4 * sum(candidates) * 4, 8 * sum(candidates)
    assert work.num_bytes - queries.num_bytes == keys + scores + votes
    assert work.num_flops - queries.num_flops == 2 * 32 * sum(candidates)
    on_cuda = block_selection(CONFIG, SELECTION, ranges, CUDA)
    assert on_cuda.num_bytes == 128 * 32 * 2 + 2 * 32 * 4 + 2 * keys + votes
    sums = dataclasses.replace(SELECTION, function="topk")
    assert on_cuda.num_bytes - block_selection(CONFIG, sums, ranges, CUDA).num_bytes == keys
    per_head = dataclasses.replace(SELECTION, sets="per_kv_head")
    more = block_selection(CONFIG, per_head, ranges, CPU)
    assert more.num_bytes - work.num_bytes == votes  # two sets instead of one


def test_attention_counts_the_rows_it_gathers_and_its_causal_half() -> None:
    (around,) = block_ranges(512, 576, SELECTION)
    before = 16 + 64 + 32
    work = block_attention(CONFIG, SELECTION, [around], CPU)
    kv = 2 * (before + 64) * 2 * 8
    assert work.num_bytes == kv * (2 + 4) + kv * 4 + 2 * 64 * 32 * 4
    assert work.num_flops == 4 * 64 * 32 * (before + 32.5)


def test_a_decode_step_selects_and_attends_to_one_window() -> None:
    around = chunk_range(1000, 1001, SELECTION)
    rows, candidates = 16 + 64 + 32, 1000 - 32 - 16
    selection = decode_selection(CONFIG, SELECTION, around, CUDA)
    gathered = 2 * rows * 16 * 4
    assert selection.num_bytes == gathered + candidates * 16 * 2 + 2 * 4 * candidates * 4 + (
        8 * candidates
    )
    attention = decode_attention(CONFIG, SELECTION, around, CUDA)
    assert attention.num_bytes == 2 * (rows + 1) * 16 * 2 + 2 * 32 * 2
    short = decode_selection(CONFIG, SELECTION, chunk_range(100, 101, SELECTION), CUDA)
    assert short.num_bytes == 2 * 100 * 16 * 4


@pytest.mark.parametrize(
    ("num_flops", "bound", "floor"), [(1.0, "memory", 2.0), (9e9, "compute", 9.0)]
)
def test_the_floor_is_the_longer_of_bytes_and_operations(
    num_flops: float, bound: str, floor: float
) -> None:
    ceilings = Ceilings(copy_bytes_per_s=1e9, flops_per_s=1e9, dtype="float32")
    kernel = make_kernel("x", "prefill", 18.0, Work(2e9, num_flops), ceilings)
    assert (kernel.bound, kernel.floor_s, kernel.share) == (bound, floor, floor / 18)


def test_percentiles_lie_between_the_values() -> None:
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile(list(map(float, range(101))), 0.95) == 95.0
