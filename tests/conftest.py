"""Options, markers and fixtures that every test shares."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tsdoc.kernels.devices import DRIVERS

if TYPE_CHECKING:
    from tsdoc.models.locate import LocatedModel

if not any(Path(path).exists() for path in DRIVERS):
    # Without a GPU, kernels run in Triton's interpreter. Read when triton is imported, which
    # transformers does, so it is set before anything else.
    os.environ.setdefault("TRITON_INTERPRET", "1")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start background jobs like that, and the processes that tests interrupt inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="a GPU test that cannot run is a failure"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips GPU tests where there are too few devices, or fails them with --require-gpu."""
    several = item.get_closest_marker("multigpu")
    needed = 2 if several else 1 if item.get_closest_marker("gpu") else 0
    if not needed:
        return
    import torch

    if torch.cuda.device_count() >= needed:
        return
    reason = f"needs {needed} CUDA device(s)"
    if item.config.getoption("--require-gpu"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def packaged_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LocatedModel]:
    """Fetches and converts the model of a profile (marker `model`), once per run."""
    from tsdoc.home import Home
    from tsdoc.models.locate import locate_model
    from tsdoc.models.profiles import check_settings, load_profile

    home = Home(tmp_path_factory.mktemp("packaged"))
    found: dict[str, LocatedModel] = {}

    def locate(name: str) -> LocatedModel:
        if name not in found:
            settings = check_settings(load_profile(name), where=name).model
            found[name] = locate_model(settings, home, offline=False, confirm=lambda plan: True)
        return found[name]

    return locate
