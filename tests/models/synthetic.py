"""Small GGUF files written with the `gguf` package from random transformers models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MERGES = ["t h", "th e", "Ġ the", "h e", "l l", "he ll", "hell o", "1 2", "Ġ Ġ", "w o", "Ċ Ċ"]
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def byte_vocabulary() -> tuple[list[str], list[int]]:
    """Returns tokens and ggml types: bytes, results of MERGES, controls, one tool, one unused."""
    tokens = sorted(ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
    types = [1] * len(tokens)
    return [*tokens, *CONTROLS, "<tool>", "[PAD0]"], [*types, 3, 3, 3, 4, 5]


def make_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """Returns a random transformers model of a family, float32."""
    torch.manual_seed(seed)
    config_class, model_class = CLASSES[family]
    config = config_class(**({"vocab_size": len(byte_vocabulary()[0])} | SHAPE | changes))
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms would be zeros and ones
            parameter.normal_(0, 0.5 / parameter.shape[-1] ** 0.5)
    return model


def llama_cpp_rows(weight: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Returns the rows of q or k as llama.cpp orders them: rotary pairs next to each other."""
    head_dim = len(weight) // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


def metadata_of(model: Any, family: str) -> dict[str, Any]:
    """Returns the architecture's keys for a model's configuration."""
    config = model.config
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if family != "qwen2" else 16,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 10_000.0,
    }


def tensors_of(model: Any, family: str) -> dict[str, npt.NDArray[np.float32]]:
    """Returns the model's tensors under GGUF names, in llama.cpp's layout."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        values = tensor.numpy()
        if stem.startswith("model.layers."):
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            if family == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                values = llama_cpp_rows(values, len(values) // 16)
            stem = f"blk.{layer}.{_NAMES[part]}"
        else:
            stem = _NAMES[stem]
        tensors[f"{stem}.{kind}"] = np.ascontiguousarray(values)
    return tensors


def byte_tokenizer_keys(pre: str | None = "gpt-2") -> dict[str, Any]:
    """Returns the tokenizer's keys for `byte_vocabulary`."""
    tokens, types = byte_vocabulary()
    keys = {
        "ggml.model": "gpt2",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": MERGES,
        "ggml.bos_token_id": tokens.index("<|endoftext|>"),
        "ggml.eos_token_id": tokens.index("<|im_end|>"),
        "ggml.add_bos_token": False,
        "chat_template": CHAT,
    }
    return keys | ({"ggml.pre": pre} if pre else {})


def write_gguf(
    path: Path,
    *,
    architecture: str,
    keys: dict[str, Any],
    tensors: dict[str, npt.NDArray[np.float32]],
    tokenizer: dict[str, Any],
    storage: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Writes a GGUF file; matrices are stored as `storage`, vectors as float32."""
    writer = gguf.GGUFWriter(path, architecture)
    groups = {f"{architecture}.": keys, "tokenizer.": tokenizer}
    for prefix, group in groups.items():
        for key, value in group.items():
            _add(writer, prefix + key, value)
    for name, values in tensors.items():
        kind = storage if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_model_gguf(path: Path, family: str = "qwen2", **changes: Any) -> tuple[Path, Any]:
    """Writes a random model of `family` as GGUF; returns the path and the transformers model."""
    model = make_model(family, **changes)
    write_gguf(
        path,
        architecture=family,
        keys=metadata_of(model, family),
        tensors=tensors_of(model, family),
        tokenizer=byte_tokenizer_keys(),
    )
    return path, model
