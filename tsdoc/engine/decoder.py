"""The decoder's linear work: embeddings, projections, norms, MLP, logits.

One config-driven decoder for the Llama family. Attention itself lives in the device cache; the
engine calls the pieces here in order (see `tsdoc.engine.forward`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from tsdoc.engine.random_weights import tensor_shapes
from tsdoc.engine.tensor_split import UNSPLIT, TensorSplit
from tsdoc.errors import ModelError
from tsdoc.kernels.products import HalfProducts, Linear, NarrowProducts, Products
from tsdoc.kernels.workers import Workers
from tsdoc.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer; names as in a Hugging Face checkpoint, absent parts None."""

    input_norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    q_bias: torch.Tensor | None
    k_bias: torch.Tensor | None
    v_bias: torch.Tensor | None
    o_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    post_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


class DecoderPart(Protocol):
    """The arithmetic between two attentions, on whatever device."""

    config: ModelConfig
    dtype: torch.dtype

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [num_tokens] int64 to hidden states [num_tokens, hidden_size]."""

    def project(
        self, layer: int, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of a layer after bias and q/k norm, before RoPE.

        Returns:
            q [num_tokens, num_qo_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim].
        """

    def finish_layer(
        self, layer: int, hidden: torch.Tensor, attention: torch.Tensor
    ) -> torch.Tensor:
        """Output projection, residuals and MLP; `hidden` is updated in place and returned.

        Args:
            layer: Which layer.
            hidden: The layer's input [num_tokens, hidden_size].
            attention: [num_tokens, num_qo_heads, head_dim].
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits [num_tokens, vocab_size] float32."""


class Decoder:
    """`DecoderPart` on the CPU.

    Args:
        config: Shape of the model.
        weights: Checkpoint tensors by their Hugging Face names.
        dtype: Type of weights, and of the rows they multiply; hidden states and norms are float32.
            Tensors of this type are used where they lie (memory-mapped), others are converted.
        split: Where several ranks compute together: `config` and `weights` are then the shard's.
        workers: Share large products out among them.

    Raises:
        ModelError: a tensor is missing or has the wrong shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        split: TensorSplit = UNSPLIT,
        *,
        workers: Workers | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._split = split
        self._workers = workers or Workers()
        half = dtype == torch.bfloat16
        self._products = HalfProducts(self._workers) if half else Products(self._workers)
        parts = read_weights(config, weights, lambda tensor: tensor.to(dtype))
        self._embedding, self._norm, self._head = parts.embedding, parts.norm, parts.head
        self._layers = [parts.layer(number) for number in range(config.num_layers)]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Where its weights lie, in the order they are used: address and bytes of each tensor."""
        layers = [getattr(w, field.name) for w in self._layers for field in fields(w)]
        tensors = [*layers, self._norm, self._head, self._embedding]
        return [(t.data_ptr(), t.nbytes) for t in tensors if t is not None]

    def narrowed(self) -> Decoder:
        """The same model for one token at a time, with its own copy of the weights in bfloat16."""
        twin = copy.copy(self)
        twin._products = NarrowProducts(self._workers)
        return twin

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """See `DecoderPart.embed`."""
        return self._split.embed(ids, self._embedding).float()

    def project(
        self, layer: int, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `DecoderPart.project`."""
        config = self.config
        joint = self._products.by_rows(partial(self._qkv, self._layers[layer]), hidden)
        heads, kv = config.num_qo_heads, config.num_kv_heads
        rows = joint.view(-1, heads + 2 * kv, config.head_dim)
        return rows[:, :heads], rows[:, heads : heads + kv], rows[:, heads + kv :]

    def _qkv(self, w: LayerWeights, linear: Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values beside one another."""
        eps = self.config.norm_eps
        x = rms_norm(hidden, w.input_norm, eps)
        q, k = linear(x, w.q, w.q_bias), linear(x, w.k, w.k_bias)
        if w.q_norm is not None and w.k_norm is not None:
            heads = (-1, self.config.head_dim)
            q = rms_norm(q.view(heads), w.q_norm, eps).view(q.shape)
            k = rms_norm(k.view(heads), w.k_norm, eps).view(k.shape)
        return torch.cat((q, k, linear(x, w.v, w.v_bias)), dim=1)

    def finish_layer(
        self, layer: int, hidden: torch.Tensor, attention: torch.Tensor
    ) -> torch.Tensor:
        """See `DecoderPart.finish_layer`."""
        w, flat = self._layers[layer], attention.flatten(1).to(self.dtype)
        hidden += self._split.sum(
            self._products.by_rows(lambda linear, rows: linear(rows, w.o, w.o_bias), flat)
        )
        hidden += self._split.sum(self._products.by_rows(partial(self._mlp, w), hidden))
        return hidden

    def _mlp(self, w: LayerWeights, linear: Linear, rows: torch.Tensor) -> torch.Tensor:
        x = rms_norm(rows, w.post_norm, self.config.norm_eps)
        gated = F.silu(linear(x, w.gate, w.gate_bias), inplace=True)
        gated *= linear(x, w.up, w.up_bias)
        return linear(gated, w.down, w.down_bias)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DecoderPart.logits`."""
        x = rms_norm(hidden, self._norm, self.config.norm_eps)
        logits = self._products.by_rows(lambda linear, rows: linear(rows, self._head, None), x)
        return self._split.join(logits.float())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, in float32, scaled in the weight's type."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(weight.dtype) * weight


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A checkpoint's tensors; layers are taken one at a time."""

    embedding: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor
    config: ModelConfig
    take: _Taker

    def layer(self, number: int) -> LayerWeights:
        """Takes layer `number`."""
        return _layer(self.take, self.config, number)


def read_weights(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    convert: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> DecoderWeights:
    """Takes what is outside the layers.

    Args:
        config: Shape of the model.
        weights: Checkpoint tensors by their Hugging Face names.
        convert: What is done to each that is taken; as they are stored by default.

    Raises:
        ModelError: a tensor is missing or has the wrong shape, or a layer has one more.
    """
    _refuse_what_has_no_place(config, weights)
    take = _Taker(weights, convert)
    hidden = config.hidden_size
    embedding = take("model.embed_tokens.weight", config.vocab_size, hidden)
    return DecoderWeights(
        embedding=embedding,
        norm=take("model.norm.weight", hidden),
        head=embedding
        if config.tie_embeddings
        else take("lm_head.weight", config.vocab_size, hidden),
        config=config,
        take=take,
    )


def _refuse_what_has_no_place(config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
    """Refuses weights of layers, or biases and norms, that the config does not have.

    Without them the model would be another one, and its answers nonsense.

    Raises:
        ModelError: there are some.
    """
    known = tensor_shapes(config)
    for name in weights:
        # RoPE's frequencies are no weights; early checkpoints hold them.
        if name.startswith("model.layers.") and name not in known and "inv_freq" not in name:
            raise ModelError(f"the weights hold {name}, for which config.json has no place")


class _Taker:
    """Takes tensors out of a checkpoint with their expected shapes."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        convert: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._weights = weights
        self._convert = convert

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._weights:
            raise ModelError(f"the weights lack the tensor {name}")
        tensor = self._weights[name]
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} is {list(tensor.shape)} where the config says {list(shape)}")
        return self._convert(tensor)

    def optional(self, wanted: bool, name: str, *shape: int) -> torch.Tensor | None:
        return self(name, *shape) if wanted else None


def _layer(take: _Taker, config: ModelConfig, number: int) -> LayerWeights:
    root = f"model.layers.{number}."
    attention, mlp = root + "self_attn.", root + "mlp."
    hidden, wide, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_qo_heads * dim, config.num_kv_heads * dim
    return LayerWeights(
        input_norm=take(root + "input_layernorm.weight", hidden),
        q=take(attention + "q_proj.weight", q_size, hidden),
        k=take(attention + "k_proj.weight", kv_size, hidden),
        v=take(attention + "v_proj.weight", kv_size, hidden),
        o=take(attention + "o_proj.weight", hidden, q_size),
        q_bias=take.optional(config.qkv_bias, attention + "q_proj.bias", q_size),
        k_bias=take.optional(config.qkv_bias, attention + "k_proj.bias", kv_size),
        v_bias=take.optional(config.qkv_bias, attention + "v_proj.bias", kv_size),
        o_bias=take.optional(config.o_bias, attention + "o_proj.bias", hidden),
        q_norm=take.optional(config.qk_norm, attention + "q_norm.weight", dim),
        k_norm=take.optional(config.qk_norm, attention + "k_norm.weight", dim),
        post_norm=take(root + "post_attention_layernorm.weight", hidden),
        gate=take(mlp + "gate_proj.weight", wide, hidden),
        up=take(mlp + "up_proj.weight", wide, hidden),
        down=take(mlp + "down_proj.weight", hidden, wide),
        gate_bias=take.optional(config.mlp_bias, mlp + "gate_proj.bias", wide),
        up_bias=take.optional(config.mlp_bias, mlp + "up_proj.bias", wide),
        down_bias=take.optional(config.mlp_bias, mlp + "down_proj.bias", hidden),
    )
