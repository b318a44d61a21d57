"""The shape of a decoder, read from a Hugging Face `config.json`.

Covers the Llama family: Llama 2/3.x, Qwen2/2.5, Qwen3, Mistral, Yi (a Llama), SmolLM2 (a Llama).
What is not covered is an error here, never silent nonsense later.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsdoc.errors import ModelError, reason_of
from tsdoc.regular import open_regular

if TYPE_CHECKING:
    from tsdoc.settings import ModelShape

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM = 4096, 4096, 16_384
_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_hidden_layers",
    "vocab_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding; names and meaning as in the `rope_scaling` of a config.json.

    Fields that a type does not use are None. `original_window` is
    `original_max_position_embeddings`.
    """

    rope_type: str
    theta: float
    factor: float | None = None
    original_window: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def fields(self) -> dict[str, str | int | float | bool]:
        """Returns what differs from the default of a field, as plain data.

        A whole number is an int, so that its JSON is the same in every language.
        """
        unused = {field.name: field.default for field in dataclasses.fields(self)}
        values = {name: value for name, value in asdict(self).items() if value != unused[name]}
        return {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in values.items()
        }


def describe_rope(fields: object) -> str:
    """Returns the RoPE configuration of a model key, `RopeConfig.fields`, as people read it.

    For example "yarn, theta 1,000,000, factor 4". What is no such mapping, as another version may
    have kept it, is returned as text.
    """
    if not isinstance(fields, Mapping) or "rope_type" not in fields:
        return str(fields)
    order = [field.name for field in dataclasses.fields(RopeConfig)]  # JSON may have another one
    names = [name for name in [*order, *sorted(fields.keys() - set(order))] if name in fields]
    shown = [f"{name.replace('_', ' ')} {_number_text(fields[name])}" for name in names[1:]]
    return ", ".join([str(fields["rope_type"]), *shown])


def _number_text(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}".removesuffix(".0")
    return str(value).lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the decoder needs to know about a model's shape.

    Attributes:
        window: Positions the model was trained on (`max_position_embeddings`).
        eos_token_ids: All ids that end an answer (config and generation_config together).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: RopeConfig
    window: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Query heads per KV head; query head `h` reads KV head `h // group_size`."""
        return self.num_qo_heads // self.num_kv_heads

    def fingerprint(self) -> str:
        """Hex digest over every field: equal shapes and RoPE settings give equal digests."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Builds a `ModelConfig` from the parsed config.json (and generation_config.json).

    Raises:
        ModelError: unknown architecture or RoPE type, a feature the engine does not run (partial
            rotary, an active sliding window, experts), or a missing or impossible value.
    """
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "(none given)"
    if name not in ARCHITECTURES:
        raise ModelError(
            f"architecture {name} is not supported",
            hint=f"Supported: {', '.join(sorted(ARCHITECTURES))}.",
        )
    architecture = ARCHITECTURES[name]
    try:
        return _build(architecture, config, generation or {})
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        reason = reason_of(error)
        raise ModelError(f"config.json is incomplete or damaged ({reason})") from error


def from_shape(shape: ModelShape) -> ModelConfig:
    """Builds a `ModelConfig` from the sizes that a profile records.

    Raises:
        ModelError: the sizes are impossible.
    """
    fields = shape.model_dump()
    return from_hf({"architectures": [fields.pop("architecture")], **fields})


def read_config(directory: Path) -> ModelConfig:
    """Reads `config.json` and, where present, `generation_config.json` of a model directory.

    Raises:
        ModelError: a file is missing or damaged, or as `from_hf`.
    """
    config = _read_object(directory / "config.json")
    path = directory / "generation_config.json"
    generation = _read_object(path) if path.exists() else None
    try:
        return from_hf(config, generation)
    except ModelError as error:
        where = str(directory / "config.json")
        raise ModelError(error.message, where=where, hint=error.hint) from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"config cannot be read ({reason_of(error)})", where=str(path)) from error
    if not isinstance(value, dict):
        raise ModelError("config is not a JSON object", where=str(path))
    return value


def _build(
    architecture: str, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> ModelConfig:
    quantised = config.get("quantization_config")
    if quantised:
        raise ModelError(
            f"weights quantised as {quantised.get('quant_method', 'unknown')} are not supported",
            hint="Use the model's original weights, or a .gguf file.",
        )
    num_qo_heads = int(config["num_attention_heads"])
    num_kv_heads = int(config.get("num_key_value_heads") or num_qo_heads)
    hidden_size = int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or hidden_size // num_qo_heads)
    heads_fit = 0 < num_kv_heads <= num_qo_heads < MAX_HEADS and num_qo_heads % num_kv_heads == 0
    if not heads_fit or head_dim % 2 or not 0 < head_dim < MAX_HEAD_DIM:
        raise ModelError(
            f"{num_qo_heads} query heads over {num_kv_heads} KV heads of {head_dim} are impossible"
        )
    for key in _COUNTS:
        limit = MAX_LAYERS if key == "num_hidden_layers" else 1 << 31
        if not 0 < int(config[key]) < limit:
            raise ModelError(f"{key} is impossible ({config[key]})")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"activation {config['hidden_act']!r} is not supported (only silu)")
    _refuse_sliding_window(architecture, config)
    # Which projections carry a bias is fixed by the code of each family, except Llama's switches.
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden_size,
        intermediate_size=int(config["intermediate_size"]),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=int(config["vocab_size"]),
        norm_eps=float(config["rms_norm_eps"]),
        rope=_rope(config),
        window=int(config["max_position_embeddings"]),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "qwen2" or (attention_bias and architecture != "mistral"),
        o_bias=attention_bias and architecture in ("llama", "qwen3"),
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "llama",
        qk_norm=architecture == "qwen3",
        eos_token_ids=_eos(config, generation),
    )


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in (config, generation):
        value = source.get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(ids))


def _refuse_sliding_window(architecture: str, config: Mapping[str, Any]) -> None:
    window = config.get("sliding_window")
    kinds = set(config.get("layer_types") or [])
    if architecture == "mistral":
        active = window is not None
    elif kinds:
        active = kinds != {"full_attention"}
    else:
        active = bool(config.get("use_sliding_window", False)) and window is not None
    if active:
        raise ModelError(
            f"an active sliding window ({window} tokens) is not supported",
            hint="Use a model with full attention in every layer.",
        )


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes `rope_parameters`; earlier files have `rope_theta` and `rope_scaling`.
    table = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in table.values()):
        raise ModelError("RoPE settings that differ between layers are not supported")
    rope_type = str(table.get("rope_type") or table.get("type") or "default")
    theta = float(table.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if not (theta > 0 and math.isfinite(theta)):
        raise ModelError(f"rope_theta is impossible ({theta})")
    if float(config.get("partial_rotary_factor") or table.get("partial_rotary_factor") or 1) != 1:
        raise ModelError("partial rotary embedding is not supported")
    if rope_type not in ROPE_TYPES:
        raise ModelError(
            f"RoPE type {rope_type!r} is not supported", hint=f"Supported: {', '.join(ROPE_TYPES)}."
        )

    def number(key: str) -> float | None:
        return float(table[key]) if table.get(key) is not None else None

    original = table.get("original_max_position_embeddings") or config.get(
        "original_max_position_embeddings"
    )
    if rope_type != "default" and not (number("factor") or 0) >= 1:
        raise ModelError(f"RoPE type {rope_type!r} needs a factor of at least 1")
    if rope_type == "llama3" and None in (
        original,
        number("low_freq_factor"),
        number("high_freq_factor"),
    ):
        raise ModelError("RoPE type 'llama3' needs low_freq_factor, high_freq_factor and window")
    if rope_type in ("yarn", "llama3"):
        original = int(original or config["max_position_embeddings"])
    return RopeConfig(
        rope_type=rope_type,
        theta=theta,
        factor=number("factor"),
        original_window=original,
        low_freq_factor=number("low_freq_factor"),
        high_freq_factor=number("high_freq_factor"),
        beta_fast=number("beta_fast"),
        beta_slow=number("beta_slow"),
        mscale=number("mscale"),
        mscale_all_dim=number("mscale_all_dim"),
        attention_factor=number("attention_factor"),
        truncate=bool(table.get("truncate", True)),
    )
