"""Weights of any shape without a model: for latency, which does not depend on their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tsdoc.models.config import ModelConfig


class RandomWeights(Mapping[str, torch.Tensor]):
    """Tensors by their Hugging Face names, each made when it is taken.

    Args:
        config: Shape of the model.
        dtype: Type of the tensors.
        device: Where they are made.
        qk_gain: What q and k projections are multiplied with; more makes attention more peaked.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        qk_gain: float = 1.0,
    ) -> None:
        self._shapes = tensor_shapes(config)
        self._dtype = dtype
        self._generator = torch.Generator(device=device).manual_seed(0)
        self._qk_gain = qk_gain

    def __getitem__(self, name: str) -> torch.Tensor:
        device = self._generator.device
        tensor = torch.empty(self._shapes[name], dtype=self._dtype, device=device)
        if name.endswith("norm.weight"):
            return tensor.fill_(1.0)
        gain = self._qk_gain if ".q_proj" in name or ".k_proj" in name else 1.0
        return tensor.normal_(0.0, 0.02 * gain, generator=self._generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors by their Hugging Face names."""
    hidden, wide, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_qo_heads * dim, config.num_kv_heads * dim
    projections = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.o_bias),
        "mlp.gate_proj": (wide, hidden, config.mlp_bias),
        "mlp.up_proj": (wide, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, wide, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for number in range(config.num_layers):
        root = f"model.layers.{number}."
        shapes[root + "input_layernorm.weight"] = (hidden,)
        shapes[root + "post_attention_layernorm.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{root}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{root}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[root + "self_attn.q_norm.weight"] = (dim,)
            shapes[root + "self_attn.k_norm.weight"] = (dim,)
    return shapes
