"""The attention that selection is measured against is attention."""

from __future__ import annotations

import pytest
import torch

from tsdoc.kernels.attention import reference_attention
from tsdoc.kernels.full_attention import full_attention


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 100), (16, 16), (16, 130)])
def test_on_a_cpu_it_equals_the_reference(num_queries: int, num_keys: int) -> None:
    q, k, v = noise(num_queries, 6, 16), noise(num_keys, 2, 16), noise(num_keys + 1, 2, 16)[1:]
    expected = reference_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), num_before=num_keys - num_queries
    )
    torch.testing.assert_close(full_attention(q, k, v), expected.transpose(0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 4096), (256, 4096)])
def test_on_cuda_every_query_sees_every_key(num_queries: int, num_keys: int) -> None:
    q, k, v = noise(num_queries, 28, 128), noise(num_keys, 4, 128), noise(num_keys + 1, 4, 128)[1:]
    # With all keys "before" the chunk, the reference masks nothing.
    expected = reference_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), num_before=num_keys
    ).transpose(0, 1)
    got = full_attention(*(x.to("cuda", torch.bfloat16) for x in (q, k, v)))
    torch.testing.assert_close(got.float().cpu(), expected, atol=2e-2, rtol=2e-2)
