"""The chunk attention that runs equals the plain one over odd shapes."""

from __future__ import annotations

import pytest
import torch

from tsdoc.kernels.attention import chunk_attention, reference_attention


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (7, 1), (4, 4)])
@pytest.mark.parametrize("num_before", [0, 1, 63, 100, 257])
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 100])
def test_equals_the_reference(num_tokens: int, num_before: int, heads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(num_tokens * 1000 + num_before)
    num_qo_heads, num_kv_heads = heads
    q = torch.randn(num_qo_heads, num_tokens, 24, generator=generator) * 3
    k = torch.randn(num_kv_heads, num_before + num_tokens, 24, generator=generator)
    v = torch.randn(num_kv_heads, num_before + num_tokens, 24, generator=generator)
    actual = chunk_attention(q, k, v, num_before=num_before)
    expected = reference_attention(q, k, v, num_before=num_before)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_before", [0, 1, 257])
@pytest.mark.parametrize("num_tokens", [1, 63, 512])
def test_equals_the_reference_on_cuda(num_tokens: int, num_before: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_tokens * 1000 + num_before)
    q = torch.randn(6, num_tokens, 64, generator=generator) * 3
    k = torch.randn(2, num_before + num_tokens, 64, generator=generator)
    v = torch.randn(2, num_before + num_tokens, 64, generator=generator)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    on_device = (x.cuda() for x in (q, k, v))
    actual = chunk_attention(*on_device, num_before=num_before).cpu()
    expected = reference_attention(q.float(), k.float(), v.float(), num_before=num_before)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)
