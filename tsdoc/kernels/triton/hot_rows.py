"""A decode step's window where K and V lie in host memory: over the bus go only rows that are new.

On the device are the initial and the last tokens' rows, and per layer the keys of the last
selection's candidates and the values of what it selected: `rescore` (see `index_rescore`) leaves
its candidates' keys there, so that no key crosses the bus twice in a step, and none that was a
candidate in the step before. There are two such sets per layer: one is read, the other written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.triton.tiles import PAGE_SIZE, masked_rows, padded

# Columns of a layer's state: which set is the last, rows of either, and counts of an answer.
TURN, CANDIDATES, SELECTED, KEYS_WANTED, KEYS_FOUND, VALUES_WANTED, VALUES_FOUND = (
    0, 1, 3, 5, 6, 7, 8,
)  # fmt: skip
STATE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HotLayer:
    """Rows of one layer on the device.

    Attributes:
        recent_k: [n_init + n_local + 1, num_kv_heads, head_dim] in the pool's type: the initial
            tokens', then token p's at n_init + p mod (n_local + 1).
        recent_v: Same.
        keys: [2, num_kept, num_kv_heads, head_dim]: candidates', of this and the last selection.
        values: [2, top_k, num_kv_heads, head_dim]: what was selected, of both.
        candidates: [2, num_kept] int32, ascending positions of `keys`.
        selected: [2, top_k] int32, ascending positions of `values`.
        places: [top_k] int32: which candidate each selected position is; shared by all layers.
        state: [STATE_SIZE] int32.
    """

    recent_k: torch.Tensor
    recent_v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    candidates: torch.Tensor
    selected: torch.Tensor
    places: torch.Tensor
    state: torch.Tensor


@triton.jit
def find(list_ptr, number, wanted, STEPS: tl.constexpr):
    """Where each of `wanted` is in an ascending list of fewer than 2^STEPS; -1 if it is not."""
    low = tl.zeros_like(wanted)
    high = tl.zeros_like(wanted) + number
    for _ in range(STEPS):
        middle = (low + high) >> 1
        is_open = low < high
        is_less = (tl.load(list_ptr + middle, mask=is_open, other=0) < wanted) & is_open
        low = tl.where(is_less, middle + 1, low)
        high = tl.where(is_less, high, middle)
    there = tl.load(list_ptr + low, mask=low < number, other=-1)
    return tl.where(there == wanted, low, -1)


@triton.jit(do_not_specialize=["position", "n_init", "n_local"])
def _keep_recent_kernel(
    keys_ptr,  # [num_slots, ROW] pool
    values_ptr,  # same
    page_table_ptr,  # [num_pages] int32
    recent_k_ptr,  # [n_init + n_local + 1, ROW] out
    recent_v_ptr,  # same
    position,
    n_init,
    n_local,
    ROW: tl.constexpr,
    BLOCK_ROW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PAGE: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_init = rows < n_init
    positions = tl.where(is_init, rows, position - n_local + rows - n_init)
    inside = (rows < n_init + n_local) & (positions < position)
    inside = inside & (is_init | (positions >= n_init))
    targets = tl.where(is_init, rows, n_init + positions % (n_local + 1))
    slots = masked_rows(page_table_ptr, positions, inside, PAGE)
    columns = tl.arange(0, BLOCK_ROW)
    mask = inside[:, None] & (columns < ROW)[None, :]
    source = slots[:, None] * ROW + columns[None, :]
    target = targets[:, None] * ROW + columns[None, :]
    tl.store(recent_k_ptr + target, tl.load(keys_ptr + source, mask=mask), mask=mask)
    tl.store(recent_v_ptr + target, tl.load(values_ptr + source, mask=mask), mask=mask)


def keep_recent(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    hot: HotLayer,
    position: int,
    *,
    n_init: int,
    n_local: int,
) -> None:
    """Copies what a step at `position` attends to besides what it selects into `hot`.

    Args:
        keys: [num_slots, num_kv_heads, head_dim] pool.
        values: Same.
        page_table: [num_pages] int32.
        hot: Receives rows of the first n_init and of the last n_local tokens before `position`.
        position: Of the first token that is not in the pool.
        n_init: Selection setting.
        n_local: Selection setting.
    """
    row = keys.shape[1] * keys.shape[2]
    block = 4
    _keep_recent_kernel[(triton.cdiv(n_init + n_local, block),)](
        keys, values, page_table, hot.recent_k, hot.recent_v, position, n_init, n_local, ROW=row,
        BLOCK_ROW=padded(row), BLOCK_T=block, PAGE=PAGE_SIZE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_kept", "top_k", "n_init", "n_local"])
def _gather_hot_kernel(
    keys_ptr,  # [num_slots, NUM_KV, HEAD_DIM] pool
    values_ptr,  # same
    page_table_ptr,  # [num_pages] int32
    chosen_ptr,  # [top_k] int32: positions
    places_ptr,  # [top_k] int32: which candidates they are
    recent_k_ptr,  # [n_init + n_local + 1, NUM_KV, HEAD_DIM]
    recent_v_ptr,  # same
    hot_keys_ptr,  # [2, num_kept, NUM_KV, HEAD_DIM]
    hot_values_ptr,  # [2, top_k, NUM_KV, HEAD_DIM]
    selected_ptr,  # [2, top_k] int32
    state_ptr,  # see HotLayer
    meta_ptr,  # [1, 4] int32: init_end, local_start, num_selected, num_before
    ends_ptr,  # [1] int32
    k_ptr,  # [NUM_KV, num_rows, HEAD_DIM] out
    v_ptr,  # same
    cos_ptr,  # [num_positions, HEAD_DIM] float32
    sin_ptr,  # same
    skip_ptr,  # int32
    num_rows,
    num_kept,
    top_k,
    n_init,
    n_local,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    PAGE: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    end = tl.load(ends_ptr)
    if tl.program_id(0) * BLOCK >= end * NUM_KV:
        return
    # All heads of a token beside each other: its row is read from the host as one piece.
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows, heads = lanes // NUM_KV, lanes % NUM_KV
    inside = rows < end
    init_end, local_start = tl.load(meta_ptr), tl.load(meta_ptr + 1)
    num_selected = tl.load(meta_ptr + 2)
    turn = tl.load(state_ptr)
    chosen = rows - init_end
    is_chosen = (chosen >= 0) & (chosen < num_selected) & inside
    is_recent = inside & (is_chosen == 0)
    positions = tl.load(chosen_ptr + chosen, mask=is_chosen, other=0)
    places = tl.load(places_ptr + chosen, mask=is_chosen, other=0)
    is_held = is_chosen & (places < num_kept)
    old = 1 - turn
    num_old = tl.load(state_ptr + 3 + old)
    found = find(selected_ptr + old * top_k, num_old, positions, STEPS)
    is_found = is_chosen & (found >= 0)
    is_new = is_chosen & (found < 0)
    slots = masked_rows(page_table_ptr, positions, is_chosen, PAGE)
    host = (slots * NUM_KV + heads) * HEAD_DIM
    local = local_start + chosen - num_selected
    near = tl.where(chosen < 0, rows, n_init + local % (n_local + 1))
    near = (near.to(tl.int64) * NUM_KV + heads) * HEAD_DIM
    kept = ((turn * num_kept + places).to(tl.int64) * NUM_KV + heads) * HEAD_DIM
    again = ((old * top_k + found).to(tl.int64) * NUM_KV + heads) * HEAD_DIM

    # Values first: they are what crosses the bus.
    dims = tl.arange(0, BLOCK_D)
    within = (dims < HEAD_DIM)[None, :]
    v_host = tl.load(values_ptr + host[:, None] + dims[None, :], mask=is_new[:, None] & within)
    v_found = tl.load(
        hot_values_ptr + again[:, None] + dims[None, :], mask=is_found[:, None] & within
    )
    v_near = tl.load(recent_v_ptr + near[:, None] + dims[None, :], mask=is_recent[:, None] & within)

    HALF: tl.constexpr = HEAD_DIM // 2
    half = tl.arange(0, BLOCK_H)
    narrow = (half < HALF)[None, :]
    mask = is_recent[:, None] & narrow
    at = near[:, None] + half[None, :]
    low = tl.load(recent_k_ptr + at, mask=mask)
    high = tl.load(recent_k_ptr + at + HALF, mask=mask)
    mask = is_held[:, None] & narrow
    at = kept[:, None] + half[None, :]
    low = tl.where(mask, tl.load(hot_keys_ptr + at, mask=mask), low)
    high = tl.where(mask, tl.load(hot_keys_ptr + at + HALF, mask=mask), high)
    mask = (is_chosen & (places >= num_kept))[:, None] & narrow
    at = host[:, None] + half[None, :]
    low = tl.where(mask, tl.load(keys_ptr + at, mask=mask), low)
    high = tl.where(mask, tl.load(keys_ptr + at + HALF, mask=mask), high)

    mask = inside[:, None] & narrow
    a, b = low.to(tl.float32), high.to(tl.float32)
    table = rows[:, None] * HEAD_DIM + half[None, :]
    cos = tl.load(cos_ptr + table, mask=mask)
    sin = tl.load(sin_ptr + table, mask=mask)
    target = (heads.to(tl.int64) * num_rows + rows) * HEAD_DIM
    type_out = k_ptr.dtype.element_ty
    at = target[:, None] + half[None, :]
    tl.store(k_ptr + at, (a * cos - b * sin).to(type_out), mask=mask)
    tl.store(k_ptr + at + HALF, (b * cos + a * sin).to(type_out), mask=mask)

    v = tl.where(is_new[:, None], v_host, tl.where(is_found[:, None], v_found, v_near))
    at = target[:, None] + dims[None, :]
    tl.store(v_ptr + at, v.to(type_out), mask=inside[:, None] & within)
    at = ((turn * top_k + chosen).to(tl.int64) * NUM_KV + heads) * HEAD_DIM
    mask = is_chosen[:, None] & within
    tl.store(hot_values_ptr + at[:, None] + dims[None, :], v, mask=mask)
    first = is_chosen & (heads == 0)
    tl.store(selected_ptr + turn * top_k + chosen, positions, mask=first)
    number_found = tl.sum((first & is_found).to(tl.int32), 0)
    tl.atomic_add(state_ptr + 8, number_found, sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(state_ptr + 3 + turn, num_selected)
        tl.store(state_ptr + 7, tl.load(state_ptr + 7) + num_selected)


def gather_hot(
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    chosen: torch.Tensor,
    hot: HotLayer,
    meta: torch.Tensor,
    ends: torch.Tensor,
    skip: torch.Tensor,
    rope: RopeTable,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    n_init: int,
    n_local: int,
) -> None:
    """Like `gather_rotated` for one token, with rows of `hot` where it has them.

    Args:
        keys: [num_slots, num_kv_heads, head_dim] pool in host memory, without RoPE.
        values: Same.
        page_table: [num_pages] int32.
        chosen: [top_k] int32, from `select_candidates` with `hot`.
        hot: The layer's; receives values of what was chosen.
        meta: [1, 4] int32: init_end, local_start, num_selected, num_before; init_end is n_init.
        ends: [1] int32, rows to write.
        skip: [1] int32; when it is not 0, nothing is written.
        rope: Table that covers all rows.
        k: [num_kv_heads, num_rows, head_dim], written: row r rotated to position r.
        v: Same, written.
        n_init: Selection setting.
        n_local: Selection setting.
    """
    num_kv, num_rows, head_dim = k.shape
    block = 32
    top_k, num_kept = hot.selected.shape[1], hot.candidates.shape[1]
    _gather_hot_kernel[(triton.cdiv(num_rows * num_kv, block),)](
        keys, values, page_table, chosen, hot.places, hot.recent_k, hot.recent_v, hot.keys,
        hot.values, hot.selected, hot.state, meta, ends, k, v, rope.cos, rope.sin, skip, num_rows,
        num_kept, top_k, n_init, n_local, NUM_KV=num_kv, HEAD_DIM=head_dim,
        BLOCK_D=padded(head_dim), BLOCK_H=padded(head_dim // 2), BLOCK=block,
        STEPS=top_k.bit_length(), PAGE=PAGE_SIZE,
    )  # fmt: skip
