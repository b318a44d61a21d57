"""Inputs of kernel tests: permuted pages, poisoned pools and outputs, one table of tolerances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tsdoc.kernels.rope import RopeTable, make_rope_table
from tsdoc.kernels.selection import ChunkRange
from tsdoc.models.config import RopeConfig

PAGE = 256
# (absolute, relative) by type and what is compared.
TOLERANCES = {
    (torch.float32, "votes"): (1e-9, 1e-5),
    (torch.bfloat16, "votes"): (1e-9, 1e-5),  # operands are rounded, the sums are float32
    (torch.float32, "rows"): (1e-5, 1e-5),
    (torch.bfloat16, "rows"): (1e-2, 1e-2),
    (torch.float32, "products"): (2e-5, 2e-5),
    (torch.bfloat16, "products"): (2e-2, 2e-2),  # several roundings in a row
    (torch.float32, "attention"): (2e-5, 2e-5),
    (torch.bfloat16, "attention"): (2e-2, 2e-2),
}


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, what: str, dtype: torch.dtype
) -> None:
    atol, rtol = TOLERANCES[dtype, what]
    torch.testing.assert_close(
        actual.float().cpu(), expected.float().cpu(), atol=atol, rtol=rtol, equal_nan=False
    )


@dataclass(frozen=True)
class Pool:
    """`num_tokens` tokens in permuted pages; everything else is NaN."""

    keys: torch.Tensor
    values: torch.Tensor
    page_table: torch.Tensor
    k: torch.Tensor  # the tokens' K in order, [num_tokens, num_kv_heads, head_dim]
    v: torch.Tensor


def make_pool(
    num_tokens: int, num_kv: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> Pool:
    generator = torch.Generator().manual_seed(num_tokens * 7 + num_kv + head_dim)
    num_pages = -(-num_tokens // PAGE) + 1
    table = torch.randperm(num_pages, generator=generator).int()
    k = torch.randn(num_tokens, num_kv, head_dim, generator=generator).to(dtype)
    v = torch.randn(num_tokens, num_kv, head_dim, generator=generator).to(dtype)
    keys = torch.full((num_pages * PAGE, num_kv, head_dim), torch.nan, dtype=dtype)
    values = keys.clone()
    positions = torch.arange(num_tokens)
    slots = table[positions // PAGE].long() * PAGE + positions % PAGE
    keys[slots], values[slots] = k, v
    tensors = (t.to(device) for t in (keys, values, table, k, v))
    return Pool(*tensors)


def make_rope(head_dim: int, device: torch.device, count: int = 2048) -> RopeTable:
    config = RopeConfig(rope_type="yarn", theta=1e4, factor=4.0, original_window=128, truncate=True)
    return make_rope_table(config, head_dim, count, device)


def make_meta(ranges: list[ChunkRange], selected: list[int], device: torch.device) -> torch.Tensor:
    rows = [
        (r.init_end, r.local_start, n, r.init_end + n + r.start - r.local_start)
        for r, n in zip(ranges, selected, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def only_on_gpu(device: torch.device, wanted: bool) -> None:
    """Leaves a combination to the GPU: the interpreter runs enough of them to meet every branch."""
    if wanted and device.type == "cpu":
        pytest.skip("the interpreter is slow: a GPU runs this combination")


class Poison:
    """Makes torch.empty give NaN (or -1), so that a missing write is seen."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        plain = torch.empty

        def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
            out = plain(*shape, **options)
            return out.fill_(torch.nan if out.dtype.is_floating_point else -1)

        patch.setattr(torch, "empty", poisoned)
