"""Kernel tests run on a CUDA device (marker `gpu`) and in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, so it is set before any of them is imported.
    os.environ["TRITON_INTERPRET"] = "1"

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    from triton.runtime import interpreter

    # The interpreter makes loop bounds of arrays of one element with int(), which numpy refuses.
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "interpreter" and torch.cuda.is_available():
        pytest.skip("the kernels of this process are compiled for CUDA")
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
    if where == "interpreter" and torch.cuda.is_available():
        pytest.skip("the kernels of this process are compiled for CUDA")
    return torch.device("cpu" if where == "interpreter" else "cuda"), getattr(torch, dtype)
