from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tsdoc.errors import ModelError
from tsdoc.models.config import (
    CONFIG_FILES,
    ModelConfig,
    RopeConfig,
    describe_rope,
    from_hf,
    read_config,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 8192,
    "eos_token_id": 7,
}


def test_fields_are_read() -> None:
    config = from_hf(LLAMA, {"eos_token_id": [7, 9]})
    assert (config.head_dim, config.group_size, config.window) == (16, 2, 8192)
    assert (config.rope.rope_type, config.rope.theta) == ("default", 500_000.0)
    assert config.eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("architecture", "changes", "biases"),
    [
        ("LlamaForCausalLM", {}, (False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False)),
    ],
)
def test_biases_follow_the_family(
    architecture: str, changes: dict[str, Any], biases: tuple[bool, bool, bool]
) -> None:
    config = from_hf(LLAMA | changes | {"architectures": [architecture]})
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.qk_norm == (architecture == "Qwen3ForCausalLM")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaling_is_read_under_its_old_and_new_name(key: str) -> None:
    table = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    rope = from_hf(LLAMA | {key: table}).rope
    assert (rope.rope_type, rope.factor, rope.original_window) == ("yarn", 4.0, 2048)
    assert rope.theta == 500_000.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported"),
        ({"architectures": None}, "architecture (none given)"),
        ({"architectures": []}, "architecture (none given)"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "between layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "needs a factor"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            "low_freq_factor < high_freq_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"num_attention_heads": 3}, "impossible"),
        ({"head_dim": 3}, "are impossible"),
        ({"num_attention_heads": 128, "num_key_value_heads": 128}, "heads of 0 are impossible"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised as awq"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
            "sliding window (4096 tokens)",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 4096,
            },
            "sliding window",
        ),
    ],
)
def test_what_the_engine_does_not_run_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        from_hf(LLAMA | changes)
    assert words in caught.value.message


@pytest.mark.parametrize("key", sorted(LLAMA.keys() - {"eos_token_id", "rope_theta"}))
def test_every_missing_key_is_a_model_error(key: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != key}
    if key == "num_key_value_heads":  # multi-head attention
        assert from_hf(config).num_kv_heads == 4
        return
    with pytest.raises(ModelError) as caught:
        from_hf(config)
    reason = "architecture (none given)" if key == "architectures" else f"{key} is missing"
    assert reason in caught.value.message


def read_with(directory: Path, name: str, key: str, text: str) -> ModelConfig:
    """Reads a model directory with one more key, JSON `text`, in the file `name`."""
    *outer, key = key.split(".")
    for file, values in (("config.json", LLAMA), ("generation_config.json", {})):
        own = {k: v for k, v in values.items() if k != key}
        body = json.dumps(own)[:-1] + (", " if own else "")
        more = f'"{key}": {text}'
        if outer:
            more = f'"{outer[0]}": {{"rope_type": "yarn", "factor": 2, "{key}": {text}}}'
        (directory / file).write_text(f"{body}{more}}}" if file == name else json.dumps(values))
    return read_config(directory)


NO_NUMBERS = ["Infinity", "-Infinity", "NaN", "1e400", "[2]", "true", '"2"', "-1"]
NO_COUNTS = [*NO_NUMBERS, "0", "2.5", "1" + "0" * 400]
COUNTS = [
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "original_max_position_embeddings",
    "rope_scaling.original_max_position_embeddings",
]
NUMBERS = [
    "rms_norm_eps",
    "rope_theta",
    "partial_rotary_factor",
    *(
        f"rope_scaling.{key}"
        for key in ("rope_theta", "partial_rotary_factor", "beta_fast", "beta_slow", "mscale")
    ),
    *(f"rope_scaling.{key}" for key in ("mscale_all_dim", "attention_factor", "low_freq_factor")),
]
FLAGS = [
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "use_sliding_window",
    "rope_scaling.truncate",
]
IDS = [
    "Infinity",
    "NaN",
    "1e400",
    "[[2]]",
    "[2, null]",
    "true",
    "-1",
    "100",
    "[2, 100]",
    '""',
    "{}",
]
OTHERS = [
    *(("architectures", text) for text in ('"LlamaForCausalLM"', "[5]", "[[]]", "NaN")),
    *(("layer_types", text) for text in ("5", "[[]]", "[{}]", "[NaN]")),
    *(
        (key, text)
        for key in ("rope_scaling", "rope_parameters")
        for text in ('"yarn"', "[1]", "5")
    ),
    *(("quantization_config", text) for text in ('"awq"', "[1]")),
    *((key, text) for key in ("hidden_act", "rope_scaling.type") for text in ("5", "[]", "NaN")),
]


@pytest.mark.parametrize(
    ("name", "key", "text"),
    [
        *(("config.json", key, text) for key in COUNTS for text in NO_COUNTS),
        *(("config.json", key, text) for key in NUMBERS for text in NO_NUMBERS),
        *(("config.json", key, text) for key in FLAGS for text in ("1", "NaN", '"no"', "[]")),
        *(("config.json", key, text) for key, text in OTHERS),
        *((name, "eos_token_id", text) for name in CONFIG_FILES for text in IDS),
    ],
)
def test_a_value_that_cannot_be_is_said_with_its_file_and_key(
    tmp_path: Path, name: str, key: str, text: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read_with(tmp_path, name, key, text)
    assert caught.value.where == str(tmp_path / name)
    assert caught.value.message.startswith(f"{key} holds ")
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Infinity", "eos_token_id holds Infinity, which is no token id below 100"),
        ("[2, [3]]", "eos_token_id holds a list, which is no token id below 100"),
        (f'"{"x" * 99}"', f'eos_token_id holds "{"x" * 39}…, which is no token id below 100'),
    ],
)
def test_the_value_is_shown_as_it_stands_there(tmp_path: Path, text: str, shown: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_with(tmp_path, "generation_config.json", "eos_token_id", text)
    assert caught.value.message == shown


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("eos_token_id", "null"),
        ("eos_token_id", "[]"),
        ("num_key_value_heads", "null"),
        ("head_dim", "null"),
        ("rope_theta", "null"),
        ("attention_bias", "null"),
        ("sliding_window", "Infinity"),
        ("vocab_size", "1e2"),
        ("rope_scaling.mscale", "0"),
        ("rope_scaling.attention_factor", "null"),
    ],
)
def test_null_is_as_good_as_none_and_a_whole_number_may_have_a_point(
    tmp_path: Path, key: str, text: str
) -> None:
    assert read_with(tmp_path, "config.json", key, text).vocab_size == 100


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"architectures": ["X"]}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_fingerprints_differ_when_a_field_differs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    same = read_config(tmp_path)
    assert same.fingerprint() == from_hf(LLAMA).fingerprint()
    assert same.fingerprint() != from_hf(LLAMA | {"rope_theta": 1e4}).fingerprint()


def test_rope_fields_are_plain_and_leave_out_what_is_not_used() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.5}
    rope = from_hf(LLAMA | {"rope_scaling": scaling}).rope
    assert json.dumps(rope.fields(), sort_keys=True) == (
        '{"beta_fast": 32.5, "factor": 4, "original_window": 8192, "rope_type": "yarn", '
        '"theta": 500000}'
    )
    assert from_hf(LLAMA).rope.fields() == {"rope_type": "default", "theta": 500_000}


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        (RopeConfig(rope_type="default", theta=1e5).fields(), "default, theta 100,000"),
        (
            RopeConfig(rope_type="yarn", theta=12.5, original_window=512, truncate=False).fields(),
            "yarn, theta 12.5, original window 512, truncate false",
        ),
        (
            {"theta": 1, "added": 2, "factor": 3, "rope_type": "linear"},
            "linear, theta 1, factor 3, added 2",
        ),
        ("RopeConfig(rope_type='default')", "RopeConfig(rope_type='default')"),
        ({}, "{}"),
        (None, "None"),
    ],
)
def test_the_rope_of_a_model_key_is_described_for_people(fields: object, shown: str) -> None:
    assert describe_rope(fields) == shown
