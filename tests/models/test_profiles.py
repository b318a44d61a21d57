from __future__ import annotations

import math
from pathlib import Path

import pytest

from tsdoc.engine.random_weights import tensor_shapes
from tsdoc.errors import UsageError
from tsdoc.models.config import from_shape
from tsdoc.models.profiles import check_settings, list_profiles, load_profile

PAPER = [
    "llama-3-8b-instruct",
    "qwen2-72b-instruct",
    "qwen2-7b-instruct",
    "qwen2.5-7b-instruct",
    "yi-1.5-6b-chat",
]


def profile(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_every_shipped_profile_is_valid_and_states_a_licence() -> None:
    names = [profile.name for profile in list_profiles()]
    assert {"default", "embedded", "tiny", *PAPER} <= set(names)
    for name in names:
        settings = check_settings(load_profile(name), where=name)
        if name != "default":
            assert settings.model.licence
            assert settings.model.licence_url
            assert settings.model.licence_url.startswith("https://")


@pytest.mark.parametrize("name", PAPER)
def test_profiles_of_the_paper_have_its_budgets(name: str) -> None:
    selection = load_profile(name)["selection"]
    assert (selection["n_init"], selection["n_local"], selection["top_k"]) == (128, 512, 2048)


PARAMETERS = {  # in billions, as the models' own cards say
    "embedded": 0.63,
    "llama-3-8b-instruct": 8.03,
    "qwen2-72b-instruct": 72.7,
    "qwen2-7b-instruct": 7.62,
    "qwen2.5-0.5b-instruct": 0.49,
    "qwen2.5-1.5b-instruct": 1.54,
    "qwen2.5-7b-instruct": 7.62,
    "qwen2.5-14b-instruct": 14.8,
    "qwen2.5-32b-instruct": 32.8,
    "tiny": 0.135,
    "yi-1.5-6b-chat": 6.06,
}


def test_every_profile_records_the_shape_of_its_model() -> None:
    names = {profile.name for profile in list_profiles()} - {"default"}
    assert names == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_as_many_parameters_as_its_model(name: str) -> None:
    shape = check_settings(load_profile(name), where=name).model.shape
    assert shape is not None
    config = from_shape(shape)
    count = sum(math.prod(size) for size in tensor_shapes(config).values())
    assert count / 1e9 == pytest.approx(PARAMETERS[name], rel=0.01)
    assert config.qkv_bias == name.startswith(("qwen", "embedded"))


@pytest.mark.parametrize("name", ["tiny", "embedded"])
def test_packaged_models_are_pinned(name: str) -> None:
    model = check_settings(load_profile(name), where=name).model
    assert model.small
    assert model.gguf_sha256 is not None
    for digest in [model.gguf_sha256, *(wheel.sha256 for wheel in model.wheels)]:
        assert len(bytes.fromhex(digest)) == 32
    assert all("==" in wheel.requirement for wheel in model.wheels)


def test_a_profile_of_ones_own_keeps_what_it_leaves_out(tmp_path: Path) -> None:
    path = profile(tmp_path, "selection:\n  top_k: 4096\n")
    assert load_profile(path) == {"selection": {"top_k": 4096}}
    assert load_profile(profile(tmp_path, "")) == {}


def test_keys_may_be_dotted_as_in_the_config_file(tmp_path: Path) -> None:
    text = "answer.evidence: 2\nselection: {top_k: 64}\nselection.chunk_size: 128\n"
    settings = load_profile(profile(tmp_path, text))
    assert settings == {"answer": {"evidence": 2}, "selection": {"top_k": 64, "chunk_size": 128}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("selection:\n  topk: 5\n", "setting 'selection.topk'. Did you mean selection.top_k?"),
        ("selection.topk: 5\n", "setting 'selection.topk'. Did you mean selection.top_k?"),
        ("selektion:\n  top_k: 5\n", "unknown setting 'selektion'. Did you mean selection?"),
        ("zzz: 1\n", "unknown setting 'zzz'. `tsdoc config show`"),
        ("selection:\n  top_k: -1\n", "selection.top_k does not take -1: "),
        ("selection:\n  smoothing: 2\n", "selection.smoothing does not take 2: must be odd"),
        ("engine.prefill_block: 100\n", "prefill_block 100 is not a multiple of 512"),
        ("engine.device: tpu\n", "engine.device does not take tpu: "),
        ("answer: {seed: 1}\nanswer.seed: 2\n", "answer.seed is given twice"),
        ("- a\n", "must be a mapping of settings"),
        ("a: [1\nb: 2\n", "mine.yaml:2: is not valid YAML"),
        ("a: \x00\n", "not valid YAML"),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(tmp_path: Path, text: str, words: str) -> None:
    path = profile(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load_profile(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean tiny"):
        load_profile("tini")


def test_a_missing_or_huge_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_profile(str(tmp_path / "none.yaml"))
    with pytest.raises(UsageError, match="larger than 1,000,000 bytes"):
        load_profile(profile(tmp_path, "#" * 2_000_000))
