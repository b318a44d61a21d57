"""XXH3-64 of whole KV pages on the device, as the store keeps them: what has arrived is checked.

The algorithm (seed 0, the published default secret) is that of long inputs: eight 64-bit sums take
in 16 stripes of 64 bytes, are scrambled, and so on; at the end they are folded into one number.
A page's sums depend on each other from one kilobyte to the next, so each program has a page. What
is left of each, 64 bytes, is folded on the host.
Source: Y. Collet, xxHash fast digest algorithm, XXH3 (github.com/Cyan4973/xxHash, doc/).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from tsdoc.kernels.triton.tiles import PAGE_SIZE

BLOCK_BYTES = 1024  # taken in between two scramblings
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
def _sums_kernel(
    rows_ptr,  # [grid · WORDS] int64
    keys_ptr,  # [24 | 8 | 8] int64: the secret, its last stripe's words, the first sums
    out_ptr,  # [grid, 8] int64
    WORDS: tl.constexpr,  # of a page
):
    program = tl.program_id(0)
    base = rows_ptr + program.to(tl.int64) * WORDS
    stripes, lanes = tl.arange(0, 16), tl.arange(0, 8)
    own = stripes[:, None] * 8 + lanes[None, :]
    other = stripes[:, None] * 8 + (lanes ^ 1)[None, :]
    keys = tl.load(keys_ptr + stripes[:, None] + lanes[None, :])
    scramble = tl.load(keys_ptr + 16 + lanes)
    last = tl.load(keys_ptr + 24 + lanes)
    sums = tl.load(keys_ptr + 32 + lanes)
    for first in range(0, WORDS - 128, 128):
        mixed = tl.load(base + first + own) ^ keys
        low, high = mixed & 0xFFFFFFFF, (mixed >> 32) & 0xFFFFFFFF
        sums += tl.sum(low * high + tl.load(base + first + other), 0)
        sums = ((sums ^ ((sums >> 47) & 0x1FFFF)) ^ scramble) * 0x9E3779B1
    keys = tl.where((stripes == 15)[:, None], last[None, :], keys)
    mixed = tl.load(base + (WORDS - 128) + own) ^ keys
    low, high = mixed & 0xFFFFFFFF, (mixed >> 32) & 0xFFFFFFFF
    sums += tl.sum(low * high + tl.load(base + (WORDS - 128) + other), 0)
    tl.store(out_ptr + program * 8 + lanes, sums)


def page_sums(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What `digests` makes checksums of, [num_pages, 8] int64.

    Args:
        rows: [num_tokens, 2, num_kv_heads, head_dim] contiguous, from the first token of a page on;
            what is no whole page at the end is left out.
        keys: Of `digest_keys`, on the same device.
    """
    num_pages = len(rows) // PAGE_SIZE
    out = torch.empty(num_pages, 8, dtype=torch.int64, device=rows.device)
    words = rows[: num_pages * PAGE_SIZE].reshape(-1).view(torch.int64)
    _sums_kernel[(num_pages,)](words, keys, out, WORDS=len(words) // num_pages, num_warps=1)
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


def digest_keys(device: torch.device) -> torch.Tensor:
    """What `page_sums` reads besides the pages, [40] int64."""
    secret = np.frombuffer(SECRET, "<u8", 24)
    last = np.frombuffer(SECRET, "<u8", 8, offset=len(SECRET) - 64 - 7)
    first = np.array(FIRST_SUMS, np.uint64)
    return torch.from_numpy(np.concatenate([secret, last, first]).view(np.int64)).to(device)
