"""Exact scores and votes of the candidates that the key index found, and the best of them.

    collect   positions of the votes above the floor, ascending
    rescore   reads their keys: exact scores, and each head's corrected log-sum-exp
    choose    exact votes, and the k best of them

The softmax's normaliser: of all approximate terms the candidates' are taken away and their exact
ones added, so it is exact for the candidates and approximate for the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.hot_rows import HotLayer, find
from tsdoc.kernels.triton.index_scan import Projected
from tsdoc.kernels.triton.threshold import arrives_last, ordered
from tsdoc.kernels.triton.tiles import PAGE_SIZE, masked_rows, padded, precision
from tsdoc.kernels.triton.topk import BLOCK, TopSpace, compare, places_of, take_best

BLOCK_C = 64  # candidates of one program


@triton.jit
def _count_kernel(
    votes_ptr,  # [stride] float32
    floors_ptr,  # [1] int32
    counts_ptr,  # [num_blocks] int32
    meta_ptr,  # [1, 4] int32: init_end, local_start, num_selected, num_before
    skip_ptr,  # int32
    SIZE: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    block = tl.program_id(0)
    floor = tl.load(floors_ptr).to(tl.uint32, bitcast=True)
    _, keys = _candidate_keys(votes_ptr, meta_ptr, block, SIZE)
    tl.store(counts_ptr + block, tl.sum(compare(keys, floor), 0))


@triton.jit
def _candidate_keys(votes_ptr, meta_ptr, block, SIZE: tl.constexpr):
    """Positions and keys of a block of votes; keys of what may not be selected are 0."""
    positions = block * SIZE + tl.arange(0, SIZE)
    mask = (positions >= tl.load(meta_ptr)) & (positions < tl.load(meta_ptr + 1))
    votes = tl.load(votes_ptr + positions, mask=mask, other=float("-inf"))
    return positions, ordered(votes, votes > float("-inf"))


@triton.jit(do_not_specialize=["room"])
def _collect_kernel(
    votes_ptr,  # [stride] float32
    floors_ptr,  # [1] int32
    counts_ptr,  # [num_blocks] int32
    above_ptr,  # [2, above_room] int32
    tickets_ptr,  # [1] int32
    meta_ptr,  # [1, 4] int32: init_end, local_start, num_selected, num_before
    out_ptr,  # [room] int32
    number_ptr,  # [1] int32 out: how many there are
    skip_ptr,  # int32
    room,
    above_room,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    numbers = tl.arange(0, BLOCKS)
    counts = tl.load(counts_ptr + numbers, mask=numbers < num_blocks, other=0)
    num_above, num_equal = tl.sum(counts & 0xFFFF, 0), tl.sum(counts >> 16, 0)
    counts = tl.where(numbers < block, counts, 0)
    base, equal_base = tl.sum(counts & 0xFFFF, 0), tl.sum(counts >> 16, 0)
    wanted = tl.maximum(room - num_above, 0)
    floor = tl.load(floors_ptr).to(tl.uint32, bitcast=True)
    positions, keys = _candidate_keys(votes_ptr, meta_ptr, block, SIZE)
    taken, places, _ = places_of(keys, floor, base, equal_base, wanted)
    if num_above <= room:
        tl.store(out_ptr + places, positions, mask=taken)
        tl.store(number_ptr, num_above + tl.minimum(num_equal, wanted))
    else:
        signed = keys.to(tl.int32, bitcast=True)
        tl.store(above_ptr + places, positions, mask=taken & (places < above_room))
        tl.store(above_ptr + above_room + places, signed, mask=taken & (places < above_room))
        tl.store(number_ptr, room)
        if arrives_last(tickets_ptr, num_blocks):
            held = tl.minimum(num_above, above_room)
            take_best(
                above_ptr, above_ptr + above_room, out_ptr, out_ptr, held, floor, room, False,
                SIZE, 2 * SIZE,
            )  # fmt: skip


@triton.jit(do_not_specialize=["room", "num_rows", "num_kept"])
def _rescore_kernel(
    query_ptr,  # [num_heads, HEAD_DIM], scaled
    keys_ptr,  # [num_slots, NUM_KV, HEAD_DIM]
    page_table_ptr,  # [num_pages] int32
    codes_ptr,  # [NUM_KV, num_rows, RANK] int8: two codes a byte
    weights_ptr,  # [NUM_KV, R, RANK] int8
    factors_ptr,  # [NUM_KV, R, 2] float32
    lse_ptr,  # [num_heads] float32: approximate
    positions_ptr,  # [room] int32
    number_ptr,  # [1] int32
    logits_ptr,  # [num_heads, room] float32 out
    mass_ptr,  # [NUM_KV, num_programs, 2, QUERIES] float32: approximate and exact, by the lse
    exact_lse_ptr,  # [num_heads] float32 out
    tickets_ptr,  # [NUM_KV] int32
    skip_ptr,  # int32
    hot_keys_ptr,  # [2, num_kept, NUM_KV, HEAD_DIM]: see HotLayer
    hot_list_ptr,  # [2, num_kept] int32
    state_ptr,
    room,
    num_rows,
    num_kept,
    HAS_HOT: tl.constexpr,
    STEPS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    QUERIES: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
    PAGE: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    kv_head, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    number = tl.load(number_ptr)
    rows = tl.arange(0, QUERIES)
    valid = rows < GROUP
    head = kv_head * GROUP + rows
    approximate = tl.zeros([QUERIES], tl.float32)
    exact = tl.zeros([QUERIES], tl.float32)
    if part * BLOCK_C < number:
        places = part * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = places < number
        positions = tl.load(positions_ptr + places, mask=inside, other=0)
        lse = tl.load(lse_ptr + head, mask=valid, other=float("inf"))
        lse = tl.where(lse == float("inf"), 0.0, lse)
        dims, ranks = tl.arange(0, BLOCK_D), tl.arange(0, RANK)
        inside_d = dims < HEAD_DIM
        q = tl.load(
            query_ptr + head[:, None] * HEAD_DIM + dims[None, :],
            mask=valid[:, None] & inside_d[None, :],
            other=0.0,
        )
        slots = masked_rows(page_table_ptr, positions, inside, PAGE)
        is_read = inside
        if HAS_HOT:
            old = tl.load(state_ptr)
            new = (1 - old) * num_kept + places
            is_kept = inside & (places < num_kept)
            target = (new.to(tl.int64) * NUM_KV + kv_head) * HEAD_DIM
            kept = is_kept[None, :] & inside_d[:, None]
            num_old = tl.load(state_ptr + 1 + old)
            found = find(hot_list_ptr + old * num_kept, num_old, positions, STEPS)
            is_read = inside & (found < 0)
        k = tl.load(
            keys_ptr + (slots[None, :] * NUM_KV + kv_head) * HEAD_DIM + dims[:, None],
            mask=is_read[None, :] & inside_d[:, None],
            other=0.0,
        )
        if HAS_HOT:
            hot_rows = hot_keys_ptr + target[None, :] + dims[:, None]
            is_found = inside & (found >= 0)
            source = ((old * num_kept + found).to(tl.int64) * NUM_KV + kv_head) * HEAD_DIM
            mask = is_found[None, :] & inside_d[:, None]
            again = hot_keys_ptr + source[None, :] + dims[:, None]
            k = tl.where(mask, tl.load(again, mask=mask, other=0.0), k)
            tl.store(hot_rows, k, mask=kept)
            if kv_head == 0:
                tl.store(hot_list_ptr + new, positions, mask=is_kept)
                number_found = tl.sum(is_found.to(tl.int32), 0)
                tl.atomic_add(state_ptr + 6, number_found, sem="relaxed")
                if part == 0:
                    tl.store(state_ptr + 2 - old, tl.minimum(number, num_kept))
                    tl.store(state_ptr + 5, tl.load(state_ptr + 5) + number)
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        tl.store(
            logits_ptr + head[:, None] * room + places[None, :],
            scores,
            mask=valid[:, None] & inside[None, :],
        )
        mask = valid[:, None] & inside[None, :]
        # An approximation this far off (2^100) is as good as none.
        relative = tl.minimum(scores - lse[:, None], 100.0)
        exact = tl.sum(tl.exp2(tl.where(mask, relative, float("-inf"))), 1)

        line = positions // PAGE * (PAGE // 2) + positions % (PAGE // 2)
        source = (kv_head.to(tl.int64) * num_rows + line)[None, :] * RANK + ranks[:, None]
        packed = tl.load(codes_ptr + source, mask=inside[None, :], other=0)
        is_high = (positions % PAGE >= PAGE // 2)[None, :]
        codes = tl.where(is_high, (packed >> 4) & 15, packed & 15)
        place = kv_head * R + rows
        weights = tl.load(
            weights_ptr + place[:, None] * RANK + ranks[None, :], mask=valid[:, None], other=0
        )
        scale = tl.load(factors_ptr + 2 * place, mask=valid, other=0.0)
        offset = tl.load(factors_ptr + 2 * place + 1, mask=valid, other=0.0)
        products = tl.dot(weights, codes, out_dtype=tl.int32).to(tl.float32)
        guess = products * scale[:, None] + (offset - lse)[:, None]
        approximate = tl.sum(tl.exp2(tl.where(mask, guess, float("-inf"))), 1)
    target = mass_ptr + (kv_head * num_parts + part) * 2 * QUERIES + rows
    tl.store(target, approximate)
    tl.store(target + QUERIES, exact)
    if arrives_last(tickets_ptr + kv_head, num_parts):
        parts = tl.arange(0, PROGRAMS)
        source = mass_ptr + (kv_head * num_parts + parts)[:, None] * 2 * QUERIES + rows[None, :]
        mask = (parts < num_parts)[:, None]
        approximate = tl.sum(tl.load(source, mask=mask, other=0.0), 0)
        exact = tl.sum(tl.load(source + QUERIES, mask=mask, other=0.0), 0)
        lse = tl.load(lse_ptr + head, mask=valid, other=0.0)
        share = tl.maximum(1.0 - approximate, 0.0) + exact
        tl.store(exact_lse_ptr + head, lse + tl.log2(share), mask=valid)


@triton.jit(do_not_specialize=["room", "top_k"])
def _choose_kernel(
    logits_ptr,  # [num_heads, room] float32
    lse_ptr,  # [num_heads] float32
    positions_ptr,  # [room] int32
    number_ptr,  # [1] int32
    keys_ptr,  # [room] int32: keys of the votes
    out_ptr,  # [top_k] int32
    places_ptr,  # [top_k] int32: which candidates those are, where HAS_HOT
    state_ptr,  # see HotLayer
    tickets_ptr,  # [1] int32
    meta_ptr,  # [1, 4] int32: init_end, local_start, num_selected, num_before
    skip_ptr,  # int32
    room,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HAS_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    if tl.load(skip_ptr) != 0:
        return
    number = tl.load(number_ptr)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) * BLOCK < number:
        inside = places < number
        heads = tl.arange(0, BLOCK_HEADS)
        mask = (heads < HEADS)[:, None] & inside[None, :]
        source = logits_ptr + heads[:, None] * room + places[None, :]
        logits = tl.load(source, mask=mask, other=float("-inf"))
        lse = tl.load(lse_ptr + heads, mask=heads < HEADS, other=0.0)
        votes = tl.sum(tl.exp2(logits - lse[:, None]), 0)
        keys = ordered(votes, inside).to(tl.int32, bitcast=True)
        tl.store(keys_ptr + places, keys, mask=inside)
    if arrives_last(tickets_ptr, tl.num_programs(0)):
        k = tl.load(meta_ptr + 2)
        if k > 0:
            floor = tl.full([], 0, tl.uint32)
            take_best(
                positions_ptr, keys_ptr, out_ptr, places_ptr, number, floor, k, HAS_HOT,
                SIZE, 2 * SIZE,
            )  # fmt: skip
        if HAS_HOT:  # what this step has kept is from now on the last
            tl.store(state_ptr, 1 - tl.load(state_ptr))


def select_candidates(
    query: torch.Tensor,
    votes: torch.Tensor,
    projected: Projected,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    codes: torch.Tensor,
    meta: torch.Tensor,
    skip: torch.Tensor,
    space: TopSpace,
    tickets: torch.Tensor,
    *,
    room: int,
    top_k: int,
    hot: HotLayer | None = None,
) -> torch.Tensor:
    """The best num_selected positions by exact votes of the candidates with the best `votes`.

    Args:
        query: [num_qo_heads, head_dim], times log2(e) / sqrt(head_dim).
        votes: [1, 1, length] float32 by position, from `index_votes`.
        projected: The query, from there.
        keys: [num_slots, num_kv_heads, head_dim] pool.
        page_table: [num_pages] int32.
        codes: [num_kv_heads, num_pages · 128, RANK] uint8, packed.
        meta: [1, 4] int32: init_end, local_start, num_selected, num_before.
        skip: [1] int32; when it is not 0, nothing is computed.
        space: That of `index_votes`.
        tickets: [num_kv_heads] int32, zeros before and afterwards.
        room: Candidates at most; at least num_selected.
        top_k: Largest num_selected.
        hot: Rows of `keys` on the device, of which none is read again; receives the candidates'
            keys, and which of them were chosen. None where `keys` are on the device.

    Returns:
        [1, 1, top_k] int32 ascending positions, num_selected of them written.
    """
    num_heads, head_dim = query.shape
    num_kv, num_rows, rank = codes.shape
    group, device = num_heads // num_kv, query.device
    length = votes.shape[2]
    positions = torch.empty(room, dtype=torch.int32, device=device)
    number = torch.empty(1, dtype=torch.int32, device=device)
    num_blocks = triton.cdiv(length, BLOCK)
    _count_kernel[(num_blocks,)](
        votes, space.floors, space.counts, meta, skip, SIZE=BLOCK, num_warps=8
    )
    _collect_kernel[(num_blocks,)](
        votes, space.floors, space.counts, space.above, space.tickets[1], meta, positions, number,
        skip, room, space.above.shape[2], BLOCKS=padded(num_blocks, 512), SIZE=BLOCK, num_warps=8,
    )  # fmt: skip
    logits = torch.empty(num_heads, room, device=device)
    parts = triton.cdiv(room, BLOCK_C)
    queries = padded(group, 16)
    num_kept = hot.candidates.shape[1] if hot else 0
    mass = torch.empty(num_kv, parts, 2, queries, device=device)
    lse = torch.empty(num_heads, device=device)
    _rescore_kernel[(num_kv, parts)](
        query, keys, page_table, codes.view(torch.int8), projected.weights, projected.factors,
        projected.lse, positions, number, logits, mass, lse, tickets, skip,
        *((hot.keys, hot.candidates, hot.state) if hot else (None, None, None)), room, num_rows,
        num_kept, HAS_HOT=hot is not None, STEPS=num_kept.bit_length(), PROGRAMS=padded(parts),
        GROUP=group, R=projected.weights.shape[1], QUERIES=queries,
        NUM_KV=num_kv, HEAD_DIM=head_dim, BLOCK_D=padded(head_dim, 16), RANK=rank, BLOCK_C=BLOCK_C,
        PRECISION=precision(query.dtype), PAGE=PAGE_SIZE,
    )  # fmt: skip
    out = torch.empty(1, 1, top_k, dtype=torch.int32, device=device)
    vote_keys = torch.empty(room, dtype=torch.int32, device=device)
    _choose_kernel[(triton.cdiv(room, 128),)](
        logits, lse, positions, number, vote_keys, out, hot.places if hot else None,
        hot.state if hot else None, space.tickets[1], meta, skip, room, HEADS=num_heads,
        BLOCK_HEADS=padded(num_heads), HAS_HOT=hot is not None, BLOCK=128, SIZE=BLOCK, num_warps=8,
    )  # fmt: skip
    return out
