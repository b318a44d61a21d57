"""What settings leave open, decided for a model and a device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from tsdoc.kernels.devices import Device, has_matrix_tiles
from tsdoc.kernels.index_use import IndexConfig
from tsdoc.models.config import ModelConfig
from tsdoc.models.locate import LocatedModel
from tsdoc.models.weights import stored_sizes
from tsdoc.settings import EngineSettings, Settings
from tsdoc.store.key import KVShape, ModelKey

if TYPE_CHECKING:
    import torch

MEMORY_MARGIN = 1 << 30  # left for activations and the rest of the machine


def resolve_compute_dtype(settings: EngineSettings, model: LocatedModel, device: Device) -> str:
    """Returns "float32" or "bfloat16" for `compute_dtype`.

    auto is bfloat16 on a GPU, and on a CPU with tiles for it. On others it is float32, the faster
    one on those measured, unless weights that lie on disk in a smaller type would not fit in memory
    once widened.
    """
    if settings.compute_dtype != "auto":
        return settings.compute_dtype
    if device == "cuda" or has_matrix_tiles():
        return "bfloat16"
    import psutil

    widened = sum(4 * count for count, bits in stored_sizes(model.directory) if bits < 32)
    fits = widened + MEMORY_MARGIN <= psutil.virtual_memory().total // 2
    return "float32" if fits else "bfloat16"


def narrows_weights(settings: EngineSettings, config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether a CPU's generated tokens are computed with weights in bfloat16."""
    import psutil
    import torch

    from tsdoc.engine.random_weights import tensor_shapes

    if dtype != torch.float32 or settings.decode_weights == "float32":
        return False
    if settings.decode_weights == "bfloat16":
        return True
    if settings.compute_dtype != "auto":  # float32 was asked for
        return False
    num_bytes = 2 * sum(math.prod(shape) for shape in tensor_shapes(config).values())
    return num_bytes + MEMORY_MARGIN <= psutil.virtual_memory().available


def reread_tokens(settings: EngineSettings, device: str) -> int:
    """Tokens that are read again before a question on a device, at most."""
    if settings.reread_tokens is not None:
        return settings.reread_tokens
    return 128 if device == "cpu" else 512


def index_kind(settings: EngineSettings, device: Device) -> Literal["none", "int4"]:
    """Where keys are read from disk or over the bus, an index is worth making."""
    if settings.index != "auto":
        return settings.index
    return "int4" if device == "cpu" or settings.device_memory is not None else "none"


def index_config(settings: EngineSettings, device: Device) -> IndexConfig | None:
    """How questions and answers find candidates; None reads all keys."""
    if index_kind(settings, device) == "none":
        return None
    if settings.index_candidates is None:
        return IndexConfig()
    return IndexConfig(candidates=settings.index_candidates, few=settings.index_candidates)


def uses_index(settings: Settings, device: Device, num_tokens: int) -> bool:
    """Whether questions about `num_tokens` tokens find candidates by the key index.

    Several ranks score every key.
    """
    if settings.parallel.size > 1:
        return False
    index = index_config(settings.engine, device)
    return index is not None and index.applies(settings.selection, num_tokens)


def model_key(
    fingerprint: str, config: ModelConfig, settings: Settings, compute_dtype: str
) -> ModelKey:
    """Returns what K and V are kept under: all that a prefill depends on besides token ids.

    Args:
        fingerprint: Of the model's weights, tokenizer, chat template and config.
        config: The model's.
        settings: Of selection, and `kv_dtype`.
        compute_dtype: Type of the arithmetic.
    """
    return ModelKey(
        model=fingerprint,
        rope=config.rope.fields(),
        kv_dtype=settings.engine.kv_dtype,
        compute_dtype=compute_dtype,
        **settings.selection.model_dump(),
    )


def kv_shape(config: ModelConfig, kv_dtype: str) -> KVShape:
    """Returns the shape of a model's K and V."""
    return KVShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        kv_dtype=kv_dtype,
    )
