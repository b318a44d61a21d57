"""What settings leave open."""

from __future__ import annotations

import pytest

from tsdoc.kernels.devices import Device
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
