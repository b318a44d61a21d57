"""XXH3-64 of whole KV pages in the pool, as the store keeps them: what has arrived is checked.

The algorithm (seed 0, the published default secret) is that of long inputs: eight 64-bit sums take
in 16 stripes of 64 bytes, are scrambled, and so on; at the end they are folded into one number.
A page's sums depend on each other from one kilobyte to the next, so each program has a page. What
is left of each, 64 bytes, is folded on the host.
Source: Y. Collet, xxHash fast digest algorithm, XXH3 (github.com/Cyan4973/xxHash, doc/).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.tiles import PAGE_SIZE

WORD_BYTES = 8
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F
PRIME64_3, PRIME64_4, PRIME64_5 = 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX = 0x165667919E3779F9
FIRST_SUMS = (
    PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
)  # fmt: skip
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


@triton.jit
def _words(keys_ptr, values_ptr, first_row, at, ROW: tl.constexpr):
    """Words of a page as the store has it, where each token's K is followed by its V."""
    row, place = first_row + at // (2 * ROW), at % (2 * ROW)
    is_value = place >= ROW
    source = row * ROW + place % ROW
    of_keys = tl.load(keys_ptr + source, mask=~is_value, other=0)
    return of_keys | tl.load(values_ptr + source, mask=is_value, other=0)


@triton.jit
def _sums_kernel(
    keys_ptr,  # [num_slots, ROW] int64 pool
    values_ptr,  # same
    page_table_ptr,  # [num_pages] int32
    pages_ptr,  # [grid] int32, logical
    secret_ptr,  # [24 | 8 | 8] int64: the secret, its last stripe's words, the first sums
    out_ptr,  # [grid, 8] int64
    ROW: tl.constexpr,  # words of a token's K
    PAGE: tl.constexpr,
):
    program = tl.program_id(0)
    page = tl.load(page_table_ptr + tl.load(pages_ptr + program)).to(tl.int64)
    first_row = page * PAGE
    WORDS: tl.constexpr = 2 * ROW * PAGE
    stripes, lanes = tl.arange(0, 16), tl.arange(0, 8)
    own = stripes[:, None] * 8 + lanes[None, :]
    other = stripes[:, None] * 8 + (lanes ^ 1)[None, :]
    secret = tl.load(secret_ptr + stripes[:, None] + lanes[None, :])
    scramble = tl.load(secret_ptr + 16 + lanes)
    last = tl.load(secret_ptr + 24 + lanes)
    sums = tl.load(secret_ptr + 32 + lanes)
    for first in range(0, WORDS - 128, 128):
        mixed = _words(keys_ptr, values_ptr, first_row, first + own, ROW) ^ secret
        low, high = mixed & 0xFFFFFFFF, (mixed >> 32) & 0xFFFFFFFF
        added = _words(keys_ptr, values_ptr, first_row, first + other, ROW)
        sums += tl.sum(low * high + added, 0)
        sums = ((sums ^ ((sums >> 47) & 0x1FFFF)) ^ scramble) * 0x9E3779B1
    secret = tl.where((stripes == 15)[:, None], last[None, :], secret)
    mixed = _words(keys_ptr, values_ptr, first_row, WORDS - 128 + own, ROW) ^ secret
    low, high = mixed & 0xFFFFFFFF, (mixed >> 32) & 0xFFFFFFFF
    added = _words(keys_ptr, values_ptr, first_row, WORDS - 128 + other, ROW)
    sums += tl.sum(low * high + added, 0)
    tl.store(out_ptr + program * 8 + lanes, sums)


def can_digest(rows: torch.Tensor) -> bool:
    """Whether `page_sums` can read K or V [num_slots, num_kv_heads, head_dim]: by words."""
    return math.prod(rows.shape[1:]) * rows.dtype.itemsize % WORD_BYTES == 0


def page_sums(
    keys: torch.Tensor, values: torch.Tensor, page_table: torch.Tensor, pages: torch.Tensor
) -> torch.Tensor:
    """What `digests` makes checksums of, [num_pages, 8] int64; a page is K and V of each token.

    Args:
        keys: [num_slots, num_kv_heads, head_dim] pool that `can_digest`.
        values: Likewise.
        page_table: [num_pages of the prompt] int32, logical to physical page.
        pages: [num_pages] int32, logical.
    """
    out = torch.empty(len(pages), 8, dtype=torch.int64, device=keys.device)
    _sums_kernel[(len(pages),)](
        keys.reshape(-1).view(torch.int64),
        values.reshape(-1).view(torch.int64),
        page_table,
        pages,
        torch.from_numpy(_secret()).to(keys.device),
        out,
        ROW=keys[0].numel() * keys.dtype.itemsize // WORD_BYTES,
        PAGE=PAGE_SIZE,
        num_warps=1,
    )
    return out


def digests(sums: npt.NDArray[np.int64], num_bytes: int) -> npt.NDArray[np.uint64]:
    """XXH3-64 of pages of `num_bytes` each, [num_pages], from their `page_sums`."""
    keys = np.frombuffer(SECRET, "<u8", 8, offset=11)
    mixed = sums.view(np.uint64) ^ keys
    total = np.full(len(sums), num_bytes * PRIME64_1 % (1 << 64), np.uint64)
    for at in range(0, 8, 2):
        total += _folded_product(mixed[:, at], mixed[:, at + 1])
    total ^= total >> np.uint64(37)
    total *= np.uint64(PRIME_MX)
    out: npt.NDArray[np.uint64] = total ^ (total >> np.uint64(32))
    return out


def _folded_product(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The two halves of the 128-bit products, exclusive-ored."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    low = (a & mask) * (b & mask)
    left, right = (a >> half) * (b & mask), (a & mask) * (b >> half)
    middle = (low >> half) + (left & mask) + right
    high = (left >> half) + (middle >> half) + (a >> half) * (b >> half)
    folded: npt.NDArray[np.uint64] = ((middle << half) | (low & mask)) ^ high
    return folded


def _secret() -> npt.NDArray[np.int64]:
    """What the kernel reads besides the pages, [40]."""
    secret = np.frombuffer(SECRET, "<u8", 24)
    last = np.frombuffer(SECRET, "<u8", 8, offset=len(SECRET) - 64 - 7)
    first = np.array(FIRST_SUMS, np.uint64)
    return np.concatenate([secret, last, first]).view(np.int64)
