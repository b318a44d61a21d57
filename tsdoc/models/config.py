"""The shape of a decoder, read from a Hugging Face `config.json`.

Covers the Llama family: Llama 2/3.x, Qwen2/2.5, Qwen3, Mistral, Yi (a Llama), SmolLM2 (a Llama).
What is not covered is an error here, never silent nonsense later.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsdoc.errors import ModelError, reason_of
from tsdoc.models.values import Values
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
CONFIG_FILES = ("config.json", "generation_config.json")
MAX_LAYERS, MAX_HEADS, MAX_HEAD_DIM, MAX_COUNT = 4096, 4096, 16_384, 1 << 31
_ORIGINAL = "original_max_position_embeddings"


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
    return _build(Values(config, None), Values(generation or {}, None))


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
        ModelError: a file is missing or damaged, or as `from_hf`; `where` is the file to blame.
    """
    path, other = (directory / name for name in CONFIG_FILES)
    generation = _read_object(other) if other.exists() else {}
    return _build(Values(_read_object(path), str(path)), Values(generation, str(other)))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            value = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"config cannot be read ({reason_of(error)})", where=str(path)) from error
    if not isinstance(value, dict):
        raise ModelError("config is not a JSON object", where=str(path))
    return value


def _build(config: Values, generation: Values) -> ModelConfig:
    name = next(iter(config.texts("architectures")), "(none given)")
    if name not in ARCHITECTURES:
        raise config.error(
            f"architecture {name} is not supported",
            hint=f"Supported: {', '.join(sorted(ARCHITECTURES))}.",
        )
    architecture = ARCHITECTURES[name]
    quantised = config.table("quantization_config")
    if quantised.values:
        raise config.error(
            f"weights quantised as {quantised.text('quant_method', default='unknown')} are not"
            " supported",
            hint="Use the model's original weights, or a .gguf file.",
        )
    num_qo_heads = config.count("num_attention_heads", below=MAX_HEADS)
    num_kv_heads = config.count("num_key_value_heads", below=MAX_HEADS, default=num_qo_heads)
    hidden_size = config.count("hidden_size", below=MAX_COUNT)
    head_dim = config.count("head_dim", below=MAX_HEAD_DIM, default=hidden_size // num_qo_heads)
    if num_qo_heads % num_kv_heads or head_dim % 2 or not 0 < head_dim < MAX_HEAD_DIM:
        raise config.error(
            f"{num_qo_heads} query heads over {num_kv_heads} KV heads of {head_dim} are impossible"
        )
    activation = config.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise config.error(f"activation {activation!r} is not supported (only silu)")
    _refuse_sliding_window(architecture, config)
    # Which projections carry a bias is fixed by the code of each family, except Llama's switches.
    attention_bias = config.flag("attention_bias")
    mlp_bias = config.flag("mlp_bias")
    vocab_size = config.count("vocab_size", below=MAX_COUNT)
    eos = [file.ids("eos_token_id", below=vocab_size) for file in (config, generation)]
    return ModelConfig(
        architecture=architecture,
        num_layers=config.count("num_hidden_layers", below=MAX_LAYERS),
        hidden_size=hidden_size,
        intermediate_size=config.count("intermediate_size", below=MAX_COUNT),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        norm_eps=config.number("rms_norm_eps"),
        rope=_rope(config),
        window=config.count("max_position_embeddings", below=MAX_COUNT),
        tie_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=architecture == "qwen2" or (attention_bias and architecture != "mistral"),
        o_bias=attention_bias and architecture in ("llama", "qwen3"),
        mlp_bias=mlp_bias and architecture == "llama",
        qk_norm=architecture == "qwen3",
        eos_token_ids=tuple(sorted({*eos[0], *eos[1]})),
    )


def _refuse_sliding_window(architecture: str, config: Values) -> None:
    kinds = set(config.texts("layer_types"))
    if architecture == "mistral":
        active = "sliding_window" in config
    elif kinds:
        active = kinds != {"full_attention"}
    else:
        active = config.flag("use_sliding_window") and "sliding_window" in config
    if active:
        raise config.error(
            f"an active sliding window ({config.shown('sliding_window')} tokens) is not supported",
            hint="Use a model with full attention in every layer.",
        )


def _rope(config: Values) -> RopeConfig:
    # transformers 5 writes `rope_parameters`; earlier files have `rope_theta` and `rope_scaling`.
    table = config.table("rope_parameters")
    if not table.values:
        table = config.table("rope_scaling")
    if any(isinstance(value, dict) for value in table.values.values()):
        raise config.error("RoPE settings that differ between layers are not supported")
    if any(file.number("partial_rotary_factor", default=1.0) != 1 for file in (config, table)):
        raise config.error("partial rotary embedding is not supported")
    rope_type = table.text("rope_type", default=table.text("type", default="default"))
    if rope_type not in ROPE_TYPES:
        raise config.error(
            f"RoPE type {rope_type!r} is not supported", hint=f"Supported: {', '.join(ROPE_TYPES)}."
        )

    def number(key: str) -> float | None:
        return table.number(key) if table.values.get(key) else None  # 0 stands for none

    factor, low, high = map(number, ("factor", "low_freq_factor", "high_freq_factor"))
    if rope_type != "default" and (factor or 0) < 1:
        raise config.error(f"RoPE type {rope_type!r} needs a factor of at least 1")
    file = table if _ORIGINAL in table else config
    original = file.count(_ORIGINAL, below=MAX_COUNT) if _ORIGINAL in file else None
    if rope_type == "llama3" and not (original and low and high and low < high):
        raise config.error(
            f"RoPE type 'llama3' needs low_freq_factor < high_freq_factor and {_ORIGINAL}"
        )
    if rope_type == "yarn" and original is None:
        original = config.count("max_position_embeddings", below=MAX_COUNT)
    return RopeConfig(
        rope_type=rope_type,
        theta=table.number(
            "rope_theta", above=1, default=config.number("rope_theta", above=1, default=10_000.0)
        ),
        factor=factor,
        original_window=original,
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=number("beta_fast"),
        beta_slow=number("beta_slow"),
        mscale=number("mscale"),
        mscale_all_dim=number("mscale_all_dim"),
        attention_factor=number("attention_factor"),
        truncate=table.flag("truncate", default=True),
    )
