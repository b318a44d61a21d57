"""Storing, gathering, attention and element-wise kernels against plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.cases import Poison, assert_close, make_pool, make_rope, only_on_gpu
from tsdoc.engine.decoder import rms_norm as reference_rms_norm
from tsdoc.kernels.attention import reference_attention
from tsdoc.kernels.triton.attention import attend_equal_chunks, attend_rows, rotate_queries
from tsdoc.kernels.triton.decode_attention import attend_window
from tsdoc.kernels.triton.elementwise import reference_silu_mul, rms_norm, silu_mul
from tsdoc.kernels.triton.gather import gather_rotated, reference_gather
from tsdoc.kernels.triton.gemv import multiply_row
from tsdoc.kernels.triton.store import reference_store_kv, store_kv

SHAPES = [(1, 1, 64), (2, 3, 80), (2, 7, 128), (1, 8, 96), (4, 1, 256)]
Place = tuple[torch.device, torch.dtype]


@pytest.mark.parametrize(("start", "count"), [(0, 1), (63, 100), (255, 2), (256, 63), (257, 300)])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_stores_tokens_in_their_pages_and_nowhere_else(
    place: Place, start: int, count: int, head_dim: int
) -> None:
    device, dtype = place
    pool = make_pool(1000, 3, head_dim, device, dtype)
    fused = torch.randn(count, 7, head_dim, device=device)
    k, v = fused[:, 1:4], fused[:, 4:]
    keys, values = pool.keys.clone(), pool.values.clone()
    reference_store_kv(keys, values, pool.page_table, start, k, v)
    store_kv(pool.keys, pool.values, pool.page_table, start, k, v)
    assert torch.equal(pool.keys.nan_to_num(9.0), keys.nan_to_num(9.0))
    assert torch.equal(pool.values.nan_to_num(9.0), values.nan_to_num(9.0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_sets", [1, 2])
def test_gathers_init_selected_local_and_own_rows(
    place: Place, shape: tuple[int, int, int], num_sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, dtype = place
    num_kv, _, head_dim = shape
    if num_kv % num_sets:
        pytest.skip("fewer KV heads than sets")
    pool = make_pool(1000, num_kv, head_dim, device, dtype)
    rope = make_rope(head_dim, device)
    generator = torch.Generator().manual_seed(0)
    # (init_end, local_start, start, end): nothing before, nothing selected, page borders.
    chunks = [
        (0, 0, 0, 16),
        (4, 4, 16, 32),
        (4, 255, 267, 300),
        (4, 257, 269, 270),
        (4, 988, 1000, 1000),
    ]
    counts = [0, 0, 20, 19, 1]
    selected = torch.full((len(chunks), num_sets, 20), -1, dtype=torch.int32)
    expected = []
    for number, ((init, local, _, end), count) in enumerate(zip(chunks, counts, strict=True)):
        rows = []
        for chosen in range(num_sets):
            picks = torch.randperm(local - init, generator=generator)[:count].sort().values + init
            selected[number, chosen, :count] = picks
            rows.append(torch.cat((torch.arange(init), picks, torch.arange(local, end))))
        positions = torch.stack(rows).to(device)
        expected.append(reference_gather(pool.keys, pool.values, pool.page_table, positions, rope))
    meta = torch.tensor(
        [(i, lo, n, i + n + s - lo) for (i, lo, s, _), n in zip(chunks, counts, strict=True)],
        dtype=torch.int32, device=device,
    )  # fmt: skip
    ends = torch.tensor([e[0].shape[1] for e in expected], dtype=torch.int32, device=device)
    k = torch.full((len(chunks), num_kv, 100, head_dim), torch.nan, dtype=dtype, device=device)
    v = k.clone()
    gather_rotated(
        pool.keys, pool.values, pool.page_table, selected.to(device), meta, ends, rope, k, v
    )
    for number, (want_k, want_v) in enumerate(expected):
        count = want_k.shape[1]
        assert_close(k[number, :, :count], want_k, "rows", dtype)
        assert_close(v[number, :, :count], want_v, "rows", dtype)
        assert k[number, :, count:].isnan().all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunks", [[(0, 1)], [(1, 63), (100, 16)], [(63, 1), (140, 40), (0, 7)]])
def test_chunk_attention_equals_the_reference(
    place: Place,
    shape: tuple[int, int, int],
    chunks: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, dtype = place
    only_on_gpu(device, len(chunks) > 1 and shape not in (SHAPES[1], SHAPES[4]))
    num_kv, group, head_dim = shape
    rope = make_rope(head_dim, device, 512)
    generator = torch.Generator().manual_seed(head_dim)
    total = sum(count for _, count in chunks)
    fused = torch.randn(total, num_kv * group + 2, head_dim, generator=generator)
    q = fused.to(device, dtype)[:, : num_kv * group]
    longest = max(before + count for before, count in chunks) + 3
    k, v = (
        torch.randn(len(chunks), num_kv, longest, head_dim, generator=generator).to(device, dtype)
        for _ in range(2)
    )
    starts = [sum(n for _, n in chunks[:i]) for i in range(len(chunks))]
    for number, (before, count) in enumerate(chunks):
        k[number, :, before + count :] = torch.nan
        v[number, :, before + count :] = torch.nan
    meta = torch.tensor([(0, 0, 0, b) for b, _ in chunks], dtype=torch.int32, device=device)
    bounds = torch.tensor(
        [(s, n) for s, (_, n) in zip(starts, chunks, strict=True)], dtype=torch.int32, device=device
    )
    Poison(monkeypatch)
    actual = attend_rows(q, k, v, meta, bounds, rope, longest=max(n for _, n in chunks))
    monkeypatch.undo()
    for number, (before, count) in enumerate(chunks):
        rows = slice(starts[number], starts[number] + count)
        heads = rope.rotate(q[rows].float().transpose(0, 1), slice(before, before + count))
        expected = reference_attention(
            heads.cpu(), k[number, :, : before + count].float().cpu(),
            v[number, :, : before + count].float().cpu(), num_before=before,
        )  # fmt: skip
        assert_close(actual[rows].transpose(0, 1), expected, "attention", dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 63, 100, 257])
def test_decode_attention_equals_the_reference(
    place: Place, shape: tuple[int, int, int], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, dtype = place
    num_kv, group, head_dim = shape
    rope = make_rope(head_dim, device, 512)
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(num_kv * group, head_dim, generator=generator).to(device, dtype)
    k, v = (
        torch.randn(num_kv, 300, head_dim, generator=generator).to(device, dtype) for _ in range(2)
    )
    k[:, length:], v[:, length:] = torch.nan, torch.nan
    count = torch.tensor([length], dtype=torch.int32, device=device)
    Poison(monkeypatch)
    actual = attend_window(q, k, v, count, rope, num_splits=4)
    monkeypatch.undo()
    heads = rope.rotate(q.float()[:, None], slice(length - 1, length))
    expected = reference_attention(
        heads.cpu(), k[:, :length].float().cpu(), v[:, :length].float().cpu(),
        num_before=length - 1,
    )  # fmt: skip
    assert_close(actual, expected[:, 0], "attention", dtype)


@pytest.mark.parametrize("rows", [1, 63])
@pytest.mark.parametrize("size", [1, 63, 100, 1000])
def test_element_wise_kernels_equal_plain_torch(
    place: Place, rows: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, dtype = place
    generator = torch.Generator().manual_seed(size)
    wide = torch.randn(rows, 2 * size, generator=generator).to(device, dtype)
    weight = torch.rand(size, generator=generator).to(device, dtype)
    expected = reference_rms_norm(wide[:, :size], weight, 1e-6)
    gated = reference_silu_mul(wide)
    Poison(monkeypatch)
    assert_close(rms_norm(wide[:, :size], weight, 1e-6), expected, "rows", dtype)
    assert_close(silu_mul(wide), gated, "rows", dtype)


@pytest.mark.parametrize("size", [16, 63, 100, 1000])
@pytest.mark.parametrize("num_rows", [1, 63, 100])
@pytest.mark.parametrize("has_bias", [True, False])
def test_row_products_equal_plain_torch(
    place: Place, size: int, num_rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, dtype = place
    only_on_gpu(device, size == 1000 and num_rows != 63)
    generator = torch.Generator().manual_seed(size + num_rows)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(device, dtype)

    x, weight, joint = draw(1, size), draw(num_rows, size), draw(2 * num_rows, size)
    norm, residual = 1 + draw(size), draw(1, num_rows)
    bias = draw(2 * num_rows) if has_bias else None
    own = bias[:num_rows] if bias is not None else None
    normed = reference_rms_norm(x, norm, 1e-6)
    linear = torch.nn.functional.linear
    added = residual.float() + linear(x, weight, own).float()
    gated = reference_silu_mul(linear(normed, joint, bias))
    plain = linear(normed, weight, own)
    Poison(monkeypatch)
    assert_close(multiply_row(x, weight, own, norm=norm, eps=1e-6), plain, "products", dtype)
    actual = multiply_row(x, joint, bias, norm=norm, eps=1e-6, gated=True)
    assert_close(actual, gated, "products", dtype)
    assert_close(multiply_row(x, weight, own, out=residual, add=True), added, "products", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 3, 64), (2, 7, 128), (1, 8, 96), (4, 1, 80)])
@pytest.mark.parametrize(("num_before", "chunk_len"), [(1, 64), (100, 100), (257, 512)])
@pytest.mark.parametrize("is_rotated", [True, False])
def test_equal_chunks_go_through_fused_attention(
    shape: tuple[int, int, int], num_before: int, chunk_len: int, is_rotated: bool
) -> None:
    device, dtype = torch.device("cuda"), torch.bfloat16
    num_kv, group, head_dim = shape
    rope = make_rope(head_dim, device, 1024)
    generator = torch.Generator().manual_seed(head_dim)
    fused = torch.randn(3 * chunk_len, num_kv * group + 2, head_dim, generator=generator)
    q = fused.to(device, dtype)[:, : num_kv * group]
    longest = num_before + chunk_len
    k, v = (
        torch.randn(3, num_kv, longest, head_dim, generator=generator).to(device, dtype)
        for _ in range(2)
    )
    meta = torch.tensor([(0, 0, 0, num_before)] * 3, dtype=torch.int32, device=device)
    bounds = torch.tensor(
        [(i * chunk_len, chunk_len) for i in range(3)], dtype=torch.int32, device=device
    )
    rotated = rotate_queries(q, meta, bounds, rope, longest=chunk_len) if is_rotated else None
    actual = attend_equal_chunks(
        q, k, v, meta, bounds, rope, num_before=num_before, chunk_len=chunk_len, rotated=rotated
    )
    expected = attend_rows(q.float(), k.float(), v.float(), meta, bounds, rope, longest=chunk_len)
    assert_close(actual, expected, "attention", dtype)
