"""The decoder on a CUDA device: joint projections, residuals added by the products themselves.

The same arithmetic as `tsdoc.engine.decoder.Decoder`; sums that a joint product makes in float32
are rounded once instead of twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tsdoc.engine.decoder import LayerWeights, read_weights
from tsdoc.engine.tensor_split import UNSPLIT, TensorSplit
from tsdoc.kernels.triton.elementwise import rms_norm, silu_mul
from tsdoc.kernels.triton.gemv import multiply_row
from tsdoc.kernels.upload import Upload
from tsdoc.models.config import ModelConfig

MLP_ROWS = 16_384  # rows of the wide intermediate held at a time
SHARD_ROWS = 4096  # rows whose sums over ranks go on beside the next ones' products


@dataclass(frozen=True, slots=True, kw_only=True)
class _FusedLayer:
    """A layer's weights on the device; joint ones stacked along their outputs."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


class FusedDecoder:
    """See `DecoderPart`.

    Args:
        config: Shape of the model.
        weights: Checkpoint tensors by their Hugging Face names.
        dtype: Type of weights and arithmetic.
        device: Where they go.
        split: Where several ranks compute together: `config` and `weights` are then the shard's.

    Raises:
        ModelError: a tensor is missing or has the wrong shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        split: TensorSplit = UNSPLIT,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._split = split
        self._device = device
        parts = read_weights(config, weights)
        with Upload(device, dtype) as upload:
            self._embedding = upload.stack(parts.embedding)
            self._norm = upload.stack(parts.norm)
            tied = parts.head is parts.embedding
            self._head = self._embedding if tied else upload.stack(parts.head)
            self._layers = [
                _fuse(upload, parts.layer(number)) for number in range(config.num_layers)
            ]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """See `DecoderPart.embed`."""
        return self._split.embed(ids.to(self._device, non_blocking=True), self._embedding)

    def project(
        self, layer: int, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `DecoderPart.project`."""
        w, config = self._layers[layer], self.config
        if hidden.shape[0] == 1:
            joint = multiply_row(hidden, w.qkv, w.qkv_bias, norm=w.input_norm, eps=config.norm_eps)
        else:
            joint = F.linear(rms_norm(hidden, w.input_norm, config.norm_eps), w.qkv, w.qkv_bias)
        heads, kv = config.num_qo_heads, config.num_kv_heads
        rows = joint.view(-1, heads + 2 * kv, config.head_dim)
        q, k, v = rows[:, :heads], rows[:, heads : heads + kv], rows[:, heads + kv :]
        if w.q_norm is not None and w.k_norm is not None:
            q, k = self._normed(q, w.q_norm), self._normed(k, w.k_norm)
        return q, k, v

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return rms_norm(flat, weight, self.config.norm_eps).view(x.shape)

    def finish_layer(
        self, layer: int, hidden: torch.Tensor, attention: torch.Tensor
    ) -> torch.Tensor:
        """See `DecoderPart.finish_layer`."""
        w, eps = self._layers[layer], self.config.norm_eps
        if self._split.ranks.size > 1:
            return self._finish_shard(w, hidden, attention)
        if hidden.shape[0] == 1:
            multiply_row(attention.view(1, -1), w.o, w.o_bias, out=hidden, add=True)
            gated = multiply_row(
                hidden, w.gate_up, w.gate_up_bias, norm=w.post_norm, eps=eps, gated=True
            )
            return multiply_row(gated, w.down, w.down_bias, out=hidden, add=True)
        _add_product(hidden, attention.flatten(1), w.o, w.o_bias)
        for rows in torch.split(hidden, MLP_ROWS):
            x = rms_norm(rows, w.post_norm, eps)
            gated = silu_mul(F.linear(x, w.gate_up, w.gate_up_bias))
            _add_product(rows, gated, w.down, w.down_bias)
        return hidden

    def _finish_shard(
        self, w: _FusedLayer, hidden: torch.Tensor, attention: torch.Tensor
    ) -> torch.Tensor:
        """`finish_layer` of which this rank has a part: products are summed before they count."""
        eps = self.config.norm_eps
        if hidden.shape[0] == 1:
            sums, is_first = self._split.sum, self._split.is_first
            multiply_row(attention.reshape(1, -1), w.o, w.o_bias, out=hidden, add=is_first)
            sums(hidden)
            gated = multiply_row(
                hidden, w.gate_up, w.gate_up_bias, norm=w.post_norm, eps=eps, gated=True
            )
            multiply_row(gated, w.down, w.down_bias, out=hidden, add=is_first)
            return sums(hidden)
        parts = torch.split(hidden, SHARD_ROWS)
        waits = [
            self._begin_sum(rows, x, w.o, w.o_bias)
            for rows, x in zip(parts, torch.split(attention.flatten(1), SHARD_ROWS), strict=True)
        ]
        for number, rows in enumerate(parts):
            waits[number]()
            x = rms_norm(rows, w.post_norm, eps)
            gated = silu_mul(F.linear(x, w.gate_up, w.gate_up_bias))
            waits[number] = self._begin_sum(rows, gated, w.down, w.down_bias)
        for wait in waits:
            wait()
        return hidden

    def _begin_sum(
        self, rows: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Callable[[], torch.Tensor]:
        """Begins to add a product, summed over all ranks, to `rows`; called, the result waits.

        The residual is part of the first rank's product, and so of the sum.
        """
        if self._split.is_first:
            _add_product(rows, x, weight, bias)
        else:
            torch.mm(x, weight.T, out=rows)
            if bias is not None:
                rows += bias
        return self._split.start_sum(rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DecoderPart.logits`."""
        x = rms_norm(hidden, self._norm, self.config.norm_eps)
        return self._split.join(F.linear(x, self._head).float())


def _fuse(upload: Upload, w: LayerWeights) -> _FusedLayer:
    def stack(*parts: torch.Tensor | None) -> torch.Tensor | None:
        present = [part for part in parts if part is not None]
        return upload.stack(*present) if present else None

    return _FusedLayer(
        input_norm=upload.stack(w.input_norm),
        qkv=upload.stack(w.q, w.k, w.v),
        qkv_bias=stack(w.q_bias, w.k_bias, w.v_bias),
        q_norm=stack(w.q_norm),
        k_norm=stack(w.k_norm),
        o=upload.stack(w.o),
        o_bias=stack(w.o_bias),
        post_norm=upload.stack(w.post_norm),
        gate_up=upload.stack(w.gate, w.up),
        gate_up_bias=stack(w.gate_bias, w.up_bias),
        down=upload.stack(w.down),
        down_bias=stack(w.down_bias),
    )


def _add_product(
    total: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """`total` += x · weightᵀ (+ bias), in place."""
    total.addmm_(x, weight.T)
    if bias is not None:
        total += bias
