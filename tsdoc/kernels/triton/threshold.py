"""Order of votes as integers, the k-th largest of a list, and the last program of a launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered(values, mask):
    """Float32 to uint32 keys of the same order, above 0; -0 and 0 are equal; masked-out are 0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    flipped = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = flipped.to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(mask, keys, tl.zeros_like(keys))


@triton.jit
def arrives_last(ticket_ptr, num_programs):
    """Whether this program is the last of `num_programs` that come here.

    What the others wrote before is then visible to it. The ticket is 0 before and afterwards.
    """
    tl.debug_barrier()  # all warps have written
    is_last = tl.atomic_add(ticket_ptr, 1) == num_programs - 1
    if is_last:
        tl.store(ticket_ptr, 0)
    return is_last


@triton.jit
def load_keys(keys_ptr, at, num_keys):
    """Keys number `at` of a list, uint32; 0 behind its end."""
    return tl.load(keys_ptr + at, mask=at < num_keys, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def find_threshold(keys_ptr, num_keys, base, k, most, BLOCK: tl.constexpr):
    """The largest threshold that at least k keys reach, or a lower one that at most `most` reach.

    It is searched above `base`, which is the answer where fewer than k keys are above it. Two bits
    of the distance to `base` at a time, from the highest that occurs. The keys stay in the L1
    cache and the loops are short: a program that runs once is bound by fetching its instructions.

    Args:
        keys_ptr: [num_keys] int32, fewer than 2^20.
        num_keys: How many.
        base: uint32.
        k: At least 1.
        most: At least k.
        BLOCK: Keys at a time.
    """
    lanes = tl.arange(0, BLOCK)
    furthest = tl.zeros([BLOCK], tl.uint32)
    for at in range(0, num_keys, BLOCK):
        furthest = tl.maximum(furthest, load_keys(keys_ptr, at + lanes, num_keys))
    range_of_keys = tl.maximum(tl.max(furthest, 0), base) - base
    shift = tl.full([], 0, tl.int32)
    while (range_of_keys >> shift.to(tl.uint32)) > 3:
        shift += 2
    distance = tl.full([], 0, tl.uint32)
    one = tl.full([], 1, tl.uint32)
    found = tl.full([], -1, tl.int32)
    while (shift >= 0) & ((found < 0) | (found > most)):
        first = distance | (one << shift.to(tl.uint32))
        second = distance | ((one + one) << shift.to(tl.uint32))
        third = first | second
        packed = tl.zeros([BLOCK], tl.int32)  # three counts of at most 1023
        for at in range(0, num_keys, BLOCK):
            keys = tl.maximum(load_keys(keys_ptr, at + lanes, num_keys), base) - base
            packed += (keys >= first).to(tl.int32)
            packed += (keys >= second).to(tl.int32) << 10
            packed += (keys >= third).to(tl.int32) << 20
        wide = (packed & 1023).to(tl.int64) + (((packed >> 10) & 1023).to(tl.int64) << 20)
        counts = tl.sum(wide + ((packed >> 20).to(tl.int64) << 40), 0)
        count = (counts >> 40).to(tl.int32)
        if count >= k:
            distance = third
            found = count
        else:
            count = ((counts >> 20) & 0xFFFFF).to(tl.int32)
            if count >= k:
                distance = second
                found = count
            else:
                count = (counts & 0xFFFFF).to(tl.int32)
                if count >= k:
                    distance = first
                    found = count
        shift -= 2
    return base + distance


@triton.jit
def store_maxima(
    votes, inside, maxima_ptr, row, first, num_tiles, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Stores the keys of the maxima of the tiles of `votes` [BLOCK], from position `first` on."""
    keys = ordered(votes, inside)
    # Compared as signed numbers of the same order, which every reduction knows.
    signed = (keys ^ 0x80000000).to(tl.int32, bitcast=True)
    largest = tl.max(tl.reshape(signed, [BLOCK // TILE, TILE]), 1)
    largest = largest ^ -2147483648
    at = first // TILE + tl.arange(0, BLOCK // TILE)
    tl.store(maxima_ptr + row * num_tiles + at, largest, mask=at < num_tiles)


@triton.jit
def store_floor(
    maxima_ptr, floors_ptr, row, num_tiles, high, k, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Stores a key that at least k votes of the row reach, and few more: see `topk`."""
    keys_ptr = maxima_ptr + row * num_tiles
    num_keys = tl.cdiv(high, TILE)
    lanes = tl.arange(0, BLOCK)
    least = tl.full([BLOCK], 0xFFFFFFFF, tl.uint32)
    number = tl.zeros([BLOCK], tl.int32)
    for at in range(0, num_keys, BLOCK):
        keys = load_keys(keys_ptr, at + lanes, num_keys)
        least = tl.minimum(least, tl.where(keys > 0, keys, 0xFFFFFFFF))
        number += (keys > 0).to(tl.int32)
    floor = tl.full([], 0, tl.uint32)  # fewer tiles than k: any vote may win
    if k == 0:
        floor = tl.full([], 0xFFFFFFFF, tl.uint32)
    elif tl.sum(number, 0) >= k:
        floor = find_threshold(keys_ptr, num_keys, tl.min(least, 0), k, k + k // 8, BLOCK)
    tl.store(floors_ptr + row, floor.to(tl.int32, bitcast=True))
