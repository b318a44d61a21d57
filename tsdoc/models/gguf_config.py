"""From a GGUF header to config.json, and from GGUF tensor names to Hugging Face names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tsdoc.errors import ModelError
from tsdoc.models.gguf_header import GgufHeader

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"
# Metadata that changes the arithmetic in ways the decoder does not know.
_UNSUPPORTED_KEYS = (
    "expert_count",
    "attention.scale",
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "rope.scaling.yarn_log_multiplier",
    "embedding_scale",
    "rope.dimension_sections",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Where one tensor goes.

    Attributes:
        source: Its name in the GGUF file.
        target: Its name in model.safetensors.
        shape: Shape that the configuration demands.
        rotary_heads: Heads whose rows llama.cpp interleaved (architecture llama, q and k), or 0.
    """

    source: str
    target: str
    shape: tuple[int, ...]
    rotary_heads: int


def supported_architecture(header: GgufHeader) -> str:
    """Returns the architecture, before anything else of the file is looked at.

    Raises:
        ModelError: it is not supported, or the file is one part of several.
    """
    architecture = str(header.metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"architecture {architecture} is not supported",
            hint=f"Supported in GGUF files: {', '.join(ARCHITECTURES)}.",
        )
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(
            "one part of a model that is split over several GGUF files",
            hint="Join them first: llama-gguf-split --merge FIRST-PART.gguf JOINED.gguf",
        )
    return architecture


def build_config(
    header: GgufHeader, *, rope_factors: Sequence[float] | None, vocab_size: int
) -> dict[str, Any]:
    """Returns the config.json of the model that `header` describes.

    Args:
        header: Of the GGUF file.
        rope_factors: Values of the tensor rope_freqs.weight, or None when there is none.
        vocab_size: Rows of the embedding.

    Raises:
        ModelError: the architecture or a feature of it is not supported, or a key is missing.
    """
    architecture = supported_architecture(header)
    values = _Values(header.metadata, architecture)
    _refuse_unsupported(values)
    hidden_size = values.count("embedding_length")
    num_qo_heads = values.count("attention.head_count")
    head_dim = values.count("attention.key_length", default=hidden_size // num_qo_heads)
    if values.count("attention.value_length", default=head_dim) != head_dim:
        raise ModelError("keys and values of different size are not supported")
    if values.count("rope.dimension_count", default=head_dim) != head_dim:
        raise ModelError("partial rotary embedding is not supported")
    window = values.count("context_length")
    names = header.tensors
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": values.count("block_count"),
        "num_attention_heads": num_qo_heads,
        "num_key_value_heads": values.count("attention.head_count_kv", default=num_qo_heads),
        "head_dim": head_dim,
        "max_position_embeddings": window,
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(values, rope_factors, window=window, head_dim=head_dim),
        "hidden_act": "silu",
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "use_sliding_window": False,
        "dtype": "float32",
    }


def plan_tensors(header: GgufHeader, config: dict[str, Any]) -> list[TensorPlan]:
    """Returns every tensor to convert, in the order of the layers.

    Raises:
        ModelError: a tensor is missing, has another shape than `config` says, or is unknown.
    """
    biases = {
        "attn_q": config["model_type"] == "qwen2" or config["attention_bias"],
        "attn_output": config["attention_bias"],
        "ffn_up": config["mlp_bias"],
    }
    biases |= {"attn_k": biases["attn_q"], "attn_v": biases["attn_q"]}
    biases |= {"ffn_gate": biases["ffn_up"], "ffn_down": biases["ffn_up"]}
    shapes = _block_shapes(config)
    interleaved = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    top_shapes = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        top_shapes["output.weight"] = (vocab, hidden)
    plans = [_checked(header, name, _TOP[name], shape, 0) for name, shape in top_shapes.items()]
    for layer in range(config["num_hidden_layers"]):
        for part, shape in shapes.items():
            heads = interleaved.get(part, 0) if config["model_type"] == "llama" else 0
            kinds = {"weight": shape} | ({"bias": shape[:1]} if biases.get(part) else {})
            for kind, kind_shape in kinds.items():
                source = f"blk.{layer}.{part}.{kind}"
                target = f"model.layers.{layer}.{_IN_BLOCK[part]}.{kind}"
                plans.append(_checked(header, source, target, kind_shape, heads))
    unknown = sorted(header.tensors.keys() - {plan.source for plan in plans} - {ROPE_FREQS})
    if unknown:
        raise ModelError(f"tensors of an unsupported kind of model: {', '.join(unknown[:5])}")
    return plans


def _block_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (q_size, hidden),
        "attn_k": (kv_size, hidden),
        "attn_v": (kv_size, hidden),
        "attn_output": (hidden, q_size),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    if config["model_type"] == "qwen3":
        shapes |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
    return shapes


def _checked(
    header: GgufHeader, source: str, target: str, shape: tuple[int, ...], rotary_heads: int
) -> TensorPlan:
    tensor = header.tensors.get(source)
    if tensor is None:
        raise ModelError(f"tensor {source} is missing")
    if tensor.shape != shape:
        raise ModelError(f"tensor {source} has shape {tensor.shape}, expected {shape}")
    return TensorPlan(source=source, target=target, shape=shape, rotary_heads=rotary_heads)


class _Values:
    """Typed access to the keys of one architecture."""

    def __init__(self, metadata: dict[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._architecture = architecture

    def get(self, key: str) -> Any:
        """Returns the raw value, or None; per-layer lists of one repeated value count as it."""
        value = self._metadata.get(f"{self._architecture}.{key}")
        if isinstance(value, list) and value and key != "rope.dimension_sections":
            if len(set(value)) > 1:
                raise ModelError(f"{key} differs between layers, which is not supported")
            return value[0]
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """Returns a finite, positive number."""
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"GGUF key {self._architecture}.{key} is missing or impossible")
        return value

    def count(self, key: str, *, default: int | None = None, zero: int | None = None) -> int:
        """Returns a positive integer of sensible size; `zero` is what 0 stands for."""
        value = self.get(key)
        value = zero if value == 0 and zero is not None else self.number(key, default=default)
        if not isinstance(value, int) or value > 1 << 31:
            raise ModelError(f"GGUF key {self._architecture}.{key} is impossible ({value})")
        return value


def _refuse_unsupported(values: _Values) -> None:
    for key in _UNSUPPORTED_KEYS:
        if values.get(key) not in (None, 0, False, ""):
            raise ModelError(f"GGUF key {key} = {values.get(key)} is not supported")
    context = values.count("context_length")
    window = values.count("attention.sliding_window", default=context, zero=context)
    if window < context:
        raise ModelError(f"an active sliding window ({window} tokens) is not supported")


def _rope(
    values: _Values, factors: Sequence[float] | None, *, window: int, head_dim: int
) -> dict[str, Any]:
    theta = values.number("rope.freq_base", default=10_000.0)
    kind = values.get("rope.scaling.type") or "none"
    table: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind in ("linear", "yarn"):
        table |= {"rope_type": kind, "factor": values.number("rope.scaling.factor")}
    elif kind != "none":
        raise ModelError(f"RoPE scaling {kind!r} is not supported in GGUF files")
    elif values.get("rope.scale_linear") not in (None, 0, 1):
        table |= {"rope_type": "linear", "factor": values.number("rope.scale_linear")}
    if kind == "yarn":
        table |= _yarn(values, factor=table["factor"])
    if factors is None or all(factor == 1 for factor in factors):
        return table
    if table["rope_type"] != "default":
        raise ModelError("rope_freqs together with another RoPE scaling are not supported")
    return table | _llama3(factors, theta=theta, head_dim=head_dim)


def _yarn(values: _Values, *, factor: float) -> dict[str, Any]:
    if values.get("rope.scaling.yarn_ext_factor") not in (None, 1):
        raise ModelError("GGUF key rope.scaling.yarn_ext_factor is not supported")
    table: dict[str, Any] = {
        "original_max_position_embeddings": values.count("rope.scaling.original_context_length"),
        "beta_fast": values.number("rope.scaling.yarn_beta_fast", default=32.0),
        "beta_slow": values.number("rope.scaling.yarn_beta_slow", default=1.0),
    }
    # llama.cpp multiplies its own 1 + 0.1 ln(factor) by these; Hugging Face replaces it.
    extra = values.number("rope.scaling.attn_factor", default=1.0)
    extra *= values.number("rope.scaling.yarn_attn_factor", default=1.0)
    if extra != 1:
        table["attention_factor"] = extra * (1 + 0.1 * math.log(factor))
    return table


def _llama3(factors: Sequence[float], *, theta: float, head_dim: int) -> dict[str, Any]:
    """Recovers the parameters of Llama 3's frequency scaling from the per-frequency divisors.

    All published models use low 1, high 4 and 8,192 tokens; only the factor varies. The divisors
    are computed again from them, and anything that differs is refused.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = max(factors)
    expected = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        turns = original / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / factor + smooth))
    if len(factors) != len(expected) or any(
        not math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)
    ):
        raise ModelError("rope_freqs are not those of Llama 3 and are not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
