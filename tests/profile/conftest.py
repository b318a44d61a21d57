from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.session.conftest import Recorder, document, model_directory
from tsdoc.home import Home
from tsdoc.ingest.options import IngestOptions
from tsdoc.profile import decode, disk, full, prompt, roofline, run, sweep
from tsdoc.profile.prompt import ProfilePrompt
from tsdoc.profile.request import ProfileRequest
from tsdoc.profile.results import Report
from tsdoc.profile.run import run_profile
from tsdoc.settings import Settings

__all__ = ["document", "model_directory"]  # fixtures of sessions, used here too

SHAPE = {
    "architecture": "Qwen2ForCausalLM",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
}
SELECTION = {"n_init": 16, "n_local": 32, "top_k": 64, "chunk_size": 64}


def make_settings(**groups: dict[str, object]) -> Settings:
    base: dict[str, Mapping[str, object]] = {
        "model": {"source": "hf:example/small", "shape": SHAPE},
        "selection": SELECTION,
        "engine": {"prefill_block": 256, "question_chunk_size": 64, "device": "cpu"},
    }
    return Settings.model_validate(
        {name: {**base.get(name, {}), **groups.get(name, {})} for name in {*base, *groups}}
    )


def make_request(**changes: object) -> ProfileRequest:
    values: dict[str, object] = {
        "sources": (),
        "ingest": IngestOptions(),
        "num_tokens": 1000,
        "random_weights": True,
        "compare_full": False,
        "sweeps": (),
        "offline": True,
        "command": "tsdoc profile",
        "start_up_s": 0.5,
    }
    return ProfileRequest(**{**values, **changes})  # type: ignore[arg-type]


def measure_little(patch: pytest.MonkeyPatch) -> None:
    """Few steps, small probes: where the figures do not matter."""
    for module in (decode, full, sweep):
        patch.setattr(module, "STEPS", 6)
    patch.setattr(decode, "CURVE", (-1.0, 0.9))
    patch.setattr(decode, "CURVE_STEPS", 5)
    patch.setattr(decode, "PART_LIMIT_S", 0.01)
    patch.setattr(full, "SAMPLE_LIMIT_S", 0.01)
    patch.setattr(disk, "LEAST_PROBE", 1 << 16)
    patch.setattr(disk, "PROBE_PART", 1 << 15)
    patch.setattr(roofline, "COPY_BYTES", {"cpu": 1 << 16, "cuda": 1 << 24})
    patch.setattr(roofline, "PRODUCT_SIZE", {"cpu": 64, "cuda": 1024})
    patch.setattr(
        sweep, "VALUES", {"top_k": (32, 128), "theta": (None, -1.0), "chunk": (32, 64, 100)}
    )
    patch.setattr(run, "LONG_S", 0.0)


@pytest.fixture(scope="session", autouse=True)
def short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        measure_little(patch)
        yield


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Recorder, Path]:
    """Everything that a profile of random weights measures, and the home it ran in."""
    home = tmp_path_factory.mktemp("home")
    recorder = Recorder()
    request = make_request(compare_full=True, sweeps=("top_k", "theta", "chunk"))
    report = run_profile(request, settings=make_settings(), home=Home(home), reporter=recorder)
    return report, recorder, home


@pytest.fixture
def make_prompt(tmp_path: Path) -> Callable[..., ProfilePrompt]:
    def make(settings: Settings, request: ProfileRequest) -> ProfilePrompt:
        return prompt.make_prompt(request, settings, Home(tmp_path / "home"), "cpu", Recorder())

    return make
