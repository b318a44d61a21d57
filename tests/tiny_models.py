"""Tiny random models of every family, as transformers builds them, with peaked attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import transformers

from tsdoc.engine.decoder import Decoder
from tsdoc.engine.engine import Engine
from tsdoc.kernels.kv import MemoryPiece
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.models.config import ModelConfig, from_hf

VOCAB = 499
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
        "rope_theta": 500_000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 10_000.0,
    },
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def make_oracle(
    family: str, *, rope: str = "default", seed: int = 0, **changes: Any
) -> transformers.PreTrainedModel:
    """A random float32 model in eval mode; q and k are scaled so that attention is peaked."""
    config_class, model_class = FAMILIES[family]
    shape = {**SHAPE, **changes, "rope_parameters": ROPES[rope]}
    shape.pop("rope_theta")
    if family == "mistral":
        shape["sliding_window"] = None
    config = config_class(**shape)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.copy_(1.5 + torch.rand_like(parameter))
            elif "norm" in name:
                parameter.copy_(0.5 + torch.rand_like(parameter))
            else:
                gain = 4.0 if ".q_proj" in name or ".k_proj" in name else 1.5
                parameter.copy_(torch.randn_like(parameter) * gain * 0.1)
    return model


def make_config(oracle: transformers.PreTrainedModel) -> ModelConfig:
    config = oracle.config.to_dict()
    config["architectures"] = [type(oracle).__name__]
    return from_hf(config)


def make_engine(
    oracle: transformers.PreTrainedModel, selection: SelectionConfig, **changes: Any
) -> Engine:
    decoder = Decoder(make_config(oracle), oracle.state_dict(), torch.float32)
    arguments = {"max_tokens": 4096, "question_chunk_size": selection.chunk_size, **changes}
    return Engine(decoder, selection, **arguments)


def memory_piece(
    engine: Engine, capacity: int, *, start: int = 0, kv_dtype: str = "float32"
) -> MemoryPiece:
    config = engine.runner.decoder.config
    return MemoryPiece(
        start=start,
        capacity=capacity,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        kv_dtype=kv_dtype,
    )


def token_ids(count: int, seed: int = 0) -> np.ndarray:
    """Distinct ids: equal tokens have equal keys in layer 0, whose votes tie up to rounding."""
    return (np.random.default_rng(seed).permutation(VOCAB - 2)[:count] + 2).astype(np.int32)


def covering(**changes: Any) -> SelectionConfig:
    """A budget under which every test document fits, so that attention is full."""
    base = SelectionConfig(n_init=4, n_local=16, top_k=3000, chunk_size=32)
    return dataclasses.replace(base, **changes)
