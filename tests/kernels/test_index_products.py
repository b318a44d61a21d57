"""Weights times codes, as the bits of softmax terms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tsdoc.kernels import index_products
from tsdoc.kernels.index import PAGE, RANK, pack
from tsdoc.kernels.index_products import (
    GREATEST,
    GREATEST_FACTOR,
    MANTISSA,
    REFERENCE,
    ByteProducts,
    FloatProducts,
    Scratch,
    multiplies_bytes,
)

SHAPES = [(1, 1, 1), (2, 7, 1), (3, 3, 2), (2, 8, 5), (1, 77, 3)]  # KV heads, rows, pages


def make_weights(num_kv: int, num_rows: int, scale: float) -> torch.Tensor:
    return torch.randn(num_kv, num_rows, RANK, generator=torch.Generator().manual_seed(5)) * scale


def make_codes(num_kv: int, num_pages: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    codes = torch.randint(0, 16, (num_kv, num_pages * PAGE, RANK), generator=generator)
    codes[:, 0], codes[:, -1] = 0, 15
    return codes.to(torch.uint8)


def by_halves(codes: torch.Tensor) -> torch.Tensor:
    """Codes with first halves of pages before all second ones."""
    num_kv = len(codes)
    return codes.view(num_kv, -1, 2, PAGE // 2, RANK).transpose(1, 2).reshape(num_kv, -1, RANK)


def fill(products: ByteProducts | FloatProducts, codes: torch.Tensor) -> torch.Tensor:
    shape = *products.weights.shape[:2], codes.shape[1]
    bits = torch.full(shape, -1, dtype=torch.int32)
    scratch = Scratch()
    products.fill(scratch, pack(codes.flip(1)), bits)  # of another content, and used again
    products.fill(scratch, pack(codes), bits)
    return bits


@pytest.mark.parametrize("scale", [1e-3, 0.05, 0.5, 20.0])
@pytest.mark.parametrize(("num_kv", "num_rows", "num_pages"), SHAPES)
def test_bytes_give_what_whole_numbers_give(
    num_kv: int, num_rows: int, num_pages: int, scale: float
) -> None:
    weights, codes = make_weights(num_kv, num_rows, scale), make_codes(num_kv, num_pages)
    products = ByteProducts(weights)
    peaks = products.refer_to(codes[:, 3:60])
    bits = fill(products, codes)
    steps = (weights.abs().amax(-1, keepdim=True) * (MANTISSA / 127)).ceil() / MANTISSA
    assert ((products.weights - weights).abs() <= steps * 0.501).all()
    whole = (products.weights / steps).round().long()
    factors = (steps * MANTISSA).round().long().clamp_max(GREATEST_FACTOR)
    sums = whole @ by_halves(codes).long().mT
    greatest = (whole @ codes[:, 3:60].long().mT).amax(-1, keepdim=True)
    torch.testing.assert_close(peaks, (greatest * steps).squeeze(-1))
    above = (sums - greatest).clamp(-(REFERENCE // factors), GREATEST * MANTISSA // factors)
    assert torch.equal(bits.long(), above * factors + REFERENCE)
    assert torch.isfinite(bits.view(torch.float32)).all() and (bits >= 0).all()


@pytest.mark.parametrize("scale", [0.05, 0.5])
@pytest.mark.parametrize(("num_kv", "num_rows", "num_pages"), SHAPES)
def test_bytes_and_floats_give_the_same_terms(
    num_kv: int, num_rows: int, num_pages: int, scale: float
) -> None:
    codes = make_codes(num_kv, num_pages)
    bytewise = ByteProducts(make_weights(num_kv, num_rows, scale))
    plain = FloatProducts(bytewise.weights)
    for products in (bytewise, plain):
        products.refer_to(codes)
    found, expected = (fill(p, codes).view(torch.float32) for p in (bytewise, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("kind", [ByteProducts, FloatProducts])
def test_without_weights_or_without_a_sample_terms_are_alike(
    kind: type[ByteProducts] | type[FloatProducts],
) -> None:
    codes = make_codes(2, 1)
    for sample in (codes, codes[:, :0]):
        products = kind(torch.zeros(2, 3, RANK))
        assert torch.equal(products.refer_to(sample), torch.zeros(2, 3))
        torch.testing.assert_close(
            fill(products, codes).float(), torch.full((2, 3, PAGE), 1.0 * REFERENCE)
        )


@pytest.fixture
def asked_anew() -> Iterator[None]:
    multiplies_bytes.cache_clear()
    yield
    multiplies_bytes.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_what_multiplies_wrongly_or_not_at_all_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturate(weights: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_((weights.int() @ codes.int().mT).clamp(-(1 << 15), (1 << 15) - 1))

    def refuse(weights: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
        raise RuntimeError("not implemented")

    for instead in (saturate, refuse):
        monkeypatch.setattr(index_products, "_multiply", instead)
        multiplies_bytes.cache_clear()
        assert not multiplies_bytes()


@pytest.mark.usefixtures("asked_anew")
def test_other_processors_keep_to_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not multiplies_bytes()
