"""Kernel tests run on a CUDA device (marker `gpu`) and in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernels.triton.interpreter import mend_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # set by tests/conftest.py

if importlib.util.find_spec("triton") and INTERPRETED:
    mend_interpreter()

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


def check_mode(where: str) -> None:
    """Kernels are defined once per process, for the interpreter or for CUDA."""
    if where == "interpreter" and not INTERPRETED:
        pytest.skip("the kernels of this process are compiled for CUDA")


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    check_mode(request.param)
    return torch.device("cpu" if request.param == "interpreter" else "cuda")


@pytest.fixture(
    params=[
        "interpreter-float32",
        pytest.param("cuda-float32", marks=pytest.mark.gpu),
        pytest.param("cuda-bfloat16", marks=pytest.mark.gpu),
    ]
)
def place(request: pytest.FixtureRequest) -> tuple[torch.device, torch.dtype]:
    """Device and type of operands; the interpreter knows float32 alone."""
    where, dtype = request.param.split("-")
    check_mode(where)
    return torch.device("cpu" if where == "interpreter" else "cuda"), getattr(torch, dtype)


@pytest.fixture(autouse=True)
def unwritten_memory_is_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds what would show in any result that read it."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(1e30 if tensor.is_floating_point() else 127)

        return made

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
