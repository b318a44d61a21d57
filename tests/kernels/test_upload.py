"""Weights on their way to a device; the device of these tests is the CPU, or a GPU where marked."""

from __future__ import annotations

import pytest
import torch

from tsdoc.kernels import upload
from tsdoc.kernels.upload import Upload


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many to a tensor, and more than one buffer's worth to a thread."""
    monkeypatch.setattr(upload, "STAGING_BYTES", 1000)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_parts_lie_behind_one_another(
    target: torch.device, stored: torch.dtype, wanted: torch.dtype
) -> None:
    """Of any length, cut by columns or not; rounded once where the type is another."""
    wide = torch.randn(301, 2 * 70).to(stored)
    parts = [torch.randn(999, 70).to(stored), torch.randn(1, 70).to(stored), wide[:, 70:]]
    with Upload(target, wanted) as sending:
        whole = sending.stack(*parts)
        vector = sending.stack(torch.arange(5000).to(stored))
    assert (whole.device.type, whole.dtype) == (target.type, wanted)
    assert torch.equal(whole.cpu(), torch.cat(parts).to(wanted))
    assert torch.equal(vector.cpu(), torch.arange(5000).to(stored).to(wanted))


def test_a_row_may_be_longer_than_a_buffer(target: torch.device) -> None:
    rows = torch.randn(3, 5_000_000)
    with Upload(target, torch.float32) as sending:
        there = sending.stack(rows)
    assert torch.equal(there.cpu(), rows)


def test_what_a_copy_raises_is_raised_at_the_end(
    target: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Upload, *args: object) -> None:
        raise RuntimeError("no memory can be pinned")

    monkeypatch.setattr(Upload, "_send", fail)
    with pytest.raises(RuntimeError, match="pinned"), Upload(target, torch.float32) as sending:
        sending.stack(torch.ones(10, 10))


def test_an_error_in_between_is_not_lost(target: torch.device) -> None:
    with pytest.raises(KeyError, match="lacks"), Upload(target, torch.float32) as sending:
        sending.stack(torch.ones(1000, 10))
        raise KeyError("the checkpoint lacks a tensor")
