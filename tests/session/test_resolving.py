"""What settings leave open."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tsdoc.kernels import devices
from tsdoc.kernels.devices import Device
from tsdoc.kernels.torch_cache import TorchBackend
from tsdoc.session import Session
from tsdoc.session.resolving import index_config, index_kind
from tsdoc.settings import EngineSettings


@pytest.mark.parametrize(
    ("device", "limit", "kind"),
    [("cpu", None, "int4"), ("cuda", None, "none"), ("cuda", 24_000_000_000, "int4")],
)
def test_keys_have_an_index_where_reading_them_is_slow(
    device: Device, limit: int | None, kind: str
) -> None:
    settings = EngineSettings(device_memory=limit)
    assert index_kind(settings, device) == kind
    assert (index_config(settings, device) is None) == (kind == "none")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_said_about_the_index_holds_everywhere(device: Device) -> None:
    assert index_config(EngineSettings(index="none"), device) is None
    found = index_config(EngineSettings(index="int4", index_candidates=2), device)
    assert found is not None
    assert (found.candidates, found.few) == (2, 2)


AMX, NO_AMX = "flags\t\t: fpu avx512_bf16 amx_bf16 avx512_fp16\n", "flags\t\t: avx512_bf16\n"


@pytest.mark.parametrize(
    ("flags", "granted", "asked", "found"),
    [
        (AMX, True, "auto", "bfloat16"),
        (AMX, False, "auto", "float32"),
        (AMX, True, "float32", "float32"),
        (NO_AMX, True, "auto", "float32"),
        ("", True, "auto", "float32"),
        ("", False, "bfloat16", "bfloat16"),
    ],
)
def test_a_processor_with_tiles_computes_in_bfloat16(
    start: Callable[..., Session],
    flags: str,
    granted: bool,
    asked: str,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "processor_line", lambda name: flags)
    monkeypatch.setattr(devices, "_are_tiles_granted", lambda: granted)
    with start(engine={"device": "cpu", "compute_dtype": asked}) as session:
        engine = session._engines.make(100)
        dtype = getattr(torch, found)
        assert session._engines.compute_dtype == found
        assert engine.runner.decoder.dtype == dtype
        assert isinstance(engine.backend, TorchBackend)
        assert engine.backend._dtype == dtype
