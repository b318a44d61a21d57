"""A new process that does not get to its first token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.profile.conftest import make_request, make_settings
from tsdoc.profile.prompt import ProfilePrompt, describe_prompt, reopen_prompt
from tsdoc.profile.warm import WarmStartError, measure_warm
from tsdoc.prompt import render


def test_a_new_process_renders_no_template(
    model_directory: Path,
    make_prompt: Callable[..., ProfilePrompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = make_settings(model={"source": str(model_directory)})
    made = make_prompt(settings, make_request(num_tokens=100, random_weights=False))
    described = json.loads(json.dumps(describe_prompt(made)))
    render._render.cache_clear()
    monkeypatch.setattr(render, "Worker", None)
    assert reopen_prompt(described, settings, made.ids).question == made.question


def test_an_entry_that_is_missing_is_an_error(
    tmp_path: Path, make_prompt: Callable[..., ProfilePrompt]
) -> None:
    settings = make_settings()
    prompt = make_prompt(settings, make_request(num_tokens=100))
    np.save(tmp_path / "ids.npy", prompt.ids)
    with pytest.raises(WarmStartError, match="the entry was not found"):
        measure_warm(prompt, settings, "cpu", store=tmp_path / "store", ids=tmp_path / "ids.npy")
