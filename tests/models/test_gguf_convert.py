from __future__ import annotations

import contextlib
import json
import math
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from tests.models import synthetic
from tsdoc.errors import ModelError
from tsdoc.models import gguf_convert
from tsdoc.models.config import read_config
from tsdoc.models.gguf_config import build_config
from tsdoc.models.gguf_convert import convert_gguf
from tsdoc.models.gguf_header import read_gguf_header
from tsdoc.models.weights import open_weights


def convert(path: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    convert_gguf(path, directory)
    return directory


def refusal(tmp_path: Path, **parts: Any) -> str:
    """Writes a qwen2 file with changed parts, and returns why it is refused."""
    model = synthetic.make_model("qwen2")
    architecture = parts.get("architecture", "qwen2")
    path = synthetic.write_gguf(
        tmp_path / "m.gguf",
        architecture=architecture,
        keys=synthetic.metadata_of(model, "qwen2") | parts.get("keys", {}),
        tensors=parts.get("tensors", synthetic.tensors_of(model, "qwen2")),
        tokenizer=synthetic.byte_tokenizer_keys(),
    )
    with pytest.raises(ModelError) as caught:
        convert(path, tmp_path)
    assert caught.value.where == str(path)
    return caught.value.message


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_converted_weights_are_those_of_the_original_model(
    tmp_path: Path, family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "_SLICE_NUMBERS", 1000)  # several slices per matrix
    path, model = synthetic.write_model_gguf(tmp_path / "m.gguf", family, tie_word_embeddings=tied)
    directory = convert(path, tmp_path)
    weights = open_weights(directory)
    expected = dict(model.state_dict())
    if tied:
        del expected["lm_head.weight"]
    assert set(weights) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_converted_directory_answers_like_the_original_in_transformers(
    tmp_path: Path, family: str
) -> None:
    path, model = synthetic.write_model_gguf(tmp_path / "m.gguf", family)
    directory = convert(path, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_neighbouring_rotary_pairs_of_llama_become_halves(tmp_path: Path) -> None:
    """llama.cpp turns rows (2i, 2i + 1) of q and k, Hugging Face rows (i, i + d/2)."""
    path, model = synthetic.write_model_gguf(tmp_path / "m.gguf", "llama")
    stored = synthetic.tensors_of(model, "llama")
    weights = open_weights(convert(path, tmp_path))
    hidden = torch.randn(2, 64, dtype=torch.float64)  # two tokens, at positions 3 and 11
    angles = torch.tensor([[3.0], [11.0]]) * 10_000.0 ** (-torch.arange(0, 16, 2) / 16)

    def turn(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin])

    def neighbours(name: str) -> torch.Tensor:
        x = (hidden @ torch.tensor(stored[f"blk.0.{name}.weight"]).double().T).view(2, -1, 16)
        return turn(x[..., 0::2], x[..., 1::2])

    def halves(name: str) -> torch.Tensor:
        matrix = weights[f"model.layers.0.self_attn.{name}.weight"].double()
        x = (hidden @ matrix.T).view(2, -1, 16)
        return turn(x[..., :8], x[..., 8:])

    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
        torch.testing.assert_close(halves(ours), neighbours(theirs))


@pytest.mark.parametrize("storage", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_quantised_tensors_equal_the_dequantiser_slice_by_slice(
    tmp_path: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_convert, "_SLICE_NUMBERS", 1000)
    kind = gguf.GGMLQuantizationType[storage]
    model = synthetic.make_model("qwen2")
    tensors = synthetic.tensors_of(model, "qwen2")
    path = synthetic.write_gguf(
        tmp_path / "m.gguf",
        architecture="qwen2",
        keys=synthetic.metadata_of(model, "qwen2"),
        tensors=tensors,
        tokenizer=synthetic.byte_tokenizer_keys(),
        storage=kind,
    )
    weights = open_weights(convert(path, tmp_path))
    values = tensors["blk.1.ffn_down.weight"]
    expected = gguf.dequantize(gguf.quantize(values, kind), kind)
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(weights[name].numpy(), expected)


def test_configuration_is_that_of_the_original_model(tmp_path: Path) -> None:
    path, _ = synthetic.write_model_gguf(tmp_path / "m.gguf", "qwen2")
    config = read_config(convert(path, tmp_path))
    tokens = synthetic.byte_vocabulary()[0]
    assert (config.architecture, config.qkv_bias, config.o_bias) == ("qwen2", True, False)
    assert (config.num_qo_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.window, config.norm_eps, config.rope.theta) == (512, 1e-6, 10_000.0)
    ends = {tokens.index("<|im_end|>"), tokens.index("<|endoftext|>")}
    assert set(config.eos_token_ids) == ends


def test_data_of_the_weights_file_is_aligned(tmp_path: Path) -> None:
    path, _ = synthetic.write_model_gguf(tmp_path / "m.gguf", "qwen2")
    data = (convert(path, tmp_path) / "model.safetensors").read_bytes()
    assert (8 + int.from_bytes(data[:8], "little")) % 64 == 0


def llama3_factors(factor: float) -> list[float]:
    table = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(**synthetic.SHAPE, rope_parameters=table)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 10_000.0 ** (-torch.arange(0, 16, 2) / 16)
    return [float(x) for x in plain / scaled]


@pytest.mark.parametrize(
    ("factors", "rope_type"), [([1.0] * 8, "default"), (llama3_factors(32.0), "llama3")]
)
def test_rope_frequencies_become_the_scaling_they_stand_for(
    tmp_path: Path, factors: list[float], rope_type: str
) -> None:
    model = synthetic.make_model("llama")
    tensors = synthetic.tensors_of(model, "llama")
    tensors["rope_freqs.weight"] = np.array(factors, dtype=np.float32)
    path = synthetic.write_gguf(
        tmp_path / "m.gguf",
        architecture="llama",
        keys=synthetic.metadata_of(model, "llama"),
        tensors=tensors,
        tokenizer=synthetic.byte_tokenizer_keys(),
    )
    rope = read_config(convert(path, tmp_path)).rope
    assert rope.rope_type == rope_type
    if rope_type == "llama3":
        assert rope.factor == pytest.approx(32.0)
        assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)


def test_unknown_rope_frequencies_are_refused(tmp_path: Path) -> None:
    tensors = synthetic.tensors_of(synthetic.make_model("qwen2"), "qwen2")
    tensors["rope_freqs.weight"] = np.linspace(1, 3, 8, dtype=np.float32)
    assert "rope_freqs" in refusal(tmp_path, tensors=tensors)


def test_yarn_scaling_is_kept(tmp_path: Path) -> None:
    model = synthetic.make_model("qwen2")
    scaling = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
        "rope.scaling.attn_factor": 1.5,
    }
    path = synthetic.write_gguf(
        tmp_path / "m.gguf",
        architecture="qwen2",
        keys=synthetic.metadata_of(model, "qwen2") | scaling,
        tensors=synthetic.tensors_of(model, "qwen2"),
        tokenizer=synthetic.byte_tokenizer_keys(),
    )
    rope = read_config(convert(path, tmp_path)).rope
    assert (rope.rope_type, rope.factor, rope.original_window) == ("yarn", 4.0, 128)
    assert rope.attention_factor == pytest.approx(1.5 * (1 + 0.1 * math.log(4)))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.dimension_count": 8}, "partial rotary"),
        ({"attention.sliding_window": 64}, "sliding window"),
        ({"expert_count": 8}, "expert_count"),
        ({"attention.head_count_kv": [2, 1]}, "differs between layers"),
        ({"embedding_length": 128}, "has shape"),
        ({"block_count": 3}, "blk.2.attn_norm.weight is missing"),
        ({"block_count": 1}, "unsupported kind"),
        ({"context_length": 0}, "context_length"),
        ({"context_length": "many"}, "context_length"),
    ],
)
def test_what_the_decoder_does_not_know_is_refused(
    tmp_path: Path, keys: dict[str, Any], words: str
) -> None:
    assert words in refusal(tmp_path, keys=keys)


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path, architecture="gemma2") == "architecture gemma2 is not supported"


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = synthetic.tensors_of(synthetic.make_model("qwen2"), "qwen2")
    tensors["blk.0.ffn_up.weight"] = np.full_like(tensors["blk.0.ffn_up.weight"], np.nan)
    assert "not finite" in refusal(tmp_path, tensors=tensors)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    path, _ = synthetic.write_model_gguf(tmp_path / "m.gguf")
    directory = tmp_path / "model"
    directory.mkdir()
    seen: list[tuple[int, int]] = []
    convert_gguf(path, directory, lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert json.loads((directory / "config.json").read_text())["model_type"] == "qwen2"


def test_one_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path, _ = synthetic.write_model_gguf(tmp_path / "m.gguf")
    header = read_gguf_header(path)
    header.metadata["split.count"] = 3
    with pytest.raises(ModelError, match="split over several") as caught:
        build_config(header, rope_factors=None, vocab_size=300)
    assert caught.value.hint is not None


@pytest.mark.parametrize("seed", range(4))
def test_damaged_headers_are_model_errors_never_crashes(tmp_path: Path, seed: int) -> None:
    path, _ = synthetic.write_model_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    generator = random.Random(seed)
    for number in range(60):
        damaged = bytearray(data)
        for _ in range(generator.choice([1, 1, 2, 20])):
            damaged[generator.randrange(9000)] = generator.randrange(256)
        path.write_bytes(damaged)
        directory = tmp_path / str(number)
        directory.mkdir()
        with contextlib.suppress(ModelError):
            convert_gguf(path, directory)
            read_config(directory)
