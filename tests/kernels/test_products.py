"""Large products equal torch's, with and without OpenBLAS."""

from __future__ import annotations

import pytest
import torch

from tsdoc.kernels import products
from tsdoc.kernels.products import NARROW_ROWS, HalfProducts, Linear, NarrowProducts, Products
from tsdoc.kernels.workers import Workers


@pytest.mark.parametrize("openblas", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 63, 127, 128, 1025])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_a_float64_product(num_rows: int, with_bias: bool, openblas: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 96, generator=generator)
    weight = torch.randn(360, 96, generator=generator)
    bias = torch.randn(360, generator=generator) if with_bias else None
    actual = Products(Workers(2), openblas=openblas).multiply(x, weight, bias)
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(not products.prefers_openblas(), reason="this processor uses torch's products")
@pytest.mark.parametrize(("n", "k"), [(360, 96), (200, 576), (576, 1536), (4864, 896)])
def test_a_row_does_not_depend_on_the_block_around_it(n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, k, generator=generator) for rows in (1100, n))

    def compute(linear: Linear, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, weight, None)

    whole = Products(Workers(2)).by_rows(compute, x)
    for first, last in [(0, 512), (0, 513), (512, 1024), (512, 1100), (0, 48), (512, 813)]:
        for num_threads in (1, 2, 3, 5):
            part = Products(Workers(num_threads)).by_rows(compute, x[first:last])
            assert torch.equal(part, whole[first:last])


@pytest.mark.parametrize(("n", "k"), [(360, 96), (576, 1536), (896, 4864)])
def test_a_row_of_a_whole_slice_in_bfloat16_does_not_depend_on_the_block(n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, k, generator=generator).bfloat16() for rows in (1100, n))

    def compute(linear: Linear, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, weight, None)

    whole = HalfProducts(Workers(2)).by_rows(compute, x)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T, atol=1, rtol=2**-7)
    for first, last in [(0, 256), (0, 512), (0, 517), (512, 1024), (256, 1100)]:
        for num_threads in (1, 2, 3):
            part = HalfProducts(Workers(num_threads)).by_rows(compute, x[first:last])
            assert len(part) == last - first
            same = (last - first) // NARROW_ROWS * NARROW_ROWS
            assert torch.equal(part[:same], whole[first : first + same])


def test_other_types_stay_with_torch() -> None:
    x, weight = torch.randn(100, 256).bfloat16(), torch.randn(256, 256).bfloat16()
    actual = Products(Workers(2), openblas=True).multiply(x, weight)
    assert torch.equal(actual, torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(
    ("vendor", "wanted"), [("vendor_id\t: AuthenticAMD\n", True), ("GenuineIntel", False)]
)
def test_openblas_is_for_processors_that_mkl_slights(
    vendor: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "processor_line", lambda name: vendor)
    monkeypatch.setattr(torch._C, "has_mkl", True)
    assert products.prefers_openblas() is wanted


@pytest.mark.parametrize("openblas", [True, False])
@pytest.mark.parametrize("num_rows", [1, 511, 512, 1300])
def test_a_computation_is_the_same_in_slices(num_rows: int, openblas: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 200, generator=generator)
    there, back = (torch.randn(200, 200, generator=generator) for _ in range(2))

    def compute(linear: Linear, rows: torch.Tensor) -> torch.Tensor:
        return linear(torch.relu(linear(rows, there, None)), back, None)

    actual = Products(Workers(2), openblas=openblas).by_rows(compute, x)
    expected = torch.relu(x.double() @ there.double().T) @ back.double().T
    torch.testing.assert_close(actual.double(), expected, atol=2e-3, rtol=1e-4)


def test_single_rows_by_narrow_weights_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(rows, 96, generator=generator) for rows in (1, 360))
    bias = torch.randn(360, generator=generator)
    narrow = NarrowProducts(Workers(2))
    actual = narrow.by_rows(lambda linear, rows: linear(rows, weight, bias), x)
    rounded = x.bfloat16().double() @ weight.bfloat16().double().T
    torch.testing.assert_close((actual - bias).double(), rounded, atol=1e-5, rtol=2**-8)
    assert actual.dtype == torch.float32
    weight.zero_()  # what is kept is a copy, made once
    assert torch.equal(narrow.multiply(x, weight, bias), actual)
