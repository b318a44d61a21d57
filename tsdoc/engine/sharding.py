"""A rank's shard of a model: its shape, and weights that are read shard by shard.

Projections to queries, keys and values are cut by query heads; gate and up by their outputs, o and
down by their inputs; embedding and head by tokens. Norms are whole on every rank. What is cut by
rows stays a view of the mapped file; of what is cut by columns, the columns alone are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from tsdoc.engine.random_weights import tensor_shapes
from tsdoc.engine.tensor_split import TensorSplit
from tsdoc.errors import ModelError, UsageError
from tsdoc.kernels.ranks import Ranks
from tsdoc.kernels.shards import HeadShard, shard_heads
from tsdoc.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """What one rank of the tensor axis has of a model.

    Attributes:
        config: The shard's own shape: its heads, its part of FFN and vocabulary.
        heads: Its query heads.
        split: How it joins with the others.
    """

    whole: ModelConfig
    config: ModelConfig
    heads: HeadShard
    split: TensorSplit

    def weights(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The shard of a checkpoint's tensors, each cut when it is asked for."""
        return _ShardedWeights(self, weights)


def shard_model(
    config: ModelConfig,
    ranks: Ranks,
    cut: Callable[[int, int, int, int], HeadShard] = shard_heads,
) -> ModelShard:
    """Cuts a model for the tensor axis `ranks`.

    Args:
        config: Shape of the model.
        ranks: Those that share it.
        cut: How the heads are split: `shard_heads` or `shard_groups`.

    Raises:
        UsageError: there are more ranks than query heads, or they cannot be split so.
    """
    try:
        heads = cut(config.num_qo_heads, config.num_kv_heads, ranks.rank, ranks.size)
    except ValueError as error:
        raise UsageError(f"{error}", hint="Lower --parallel.") from error
    own = replace(
        config,
        num_qo_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        intermediate_size=-(-config.intermediate_size // ranks.size),
        vocab_size=-(-config.vocab_size // ranks.size),
    )
    whole_vocabulary = None if ranks.size == 1 else config.vocab_size
    split = TensorSplit(ranks=ranks, vocab_size=whole_vocabulary)
    return ModelShard(whole=config, config=own, heads=heads, split=split)


class _ShardedWeights(Mapping[str, torch.Tensor]):
    def __init__(self, shard: ModelShard, weights: Mapping[str, torch.Tensor]) -> None:
        self._shard = shard
        self._weights = weights
        self._shapes = tensor_shapes(shard.whole)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor, expected = self._weights[name], self._shapes.get(name)
        if expected is not None and tuple(tensor.shape) != expected:
            raise ModelError(
                f"{name} is {list(tensor.shape)} where the config says {list(expected)}"
            )
        part, kind = name.split(".")[-2:] if "." in name else ("", name)
        shard, dim = self._shard, self._shard.whole.head_dim
        heads, kv = (shard.heads.first, shard.heads.last), shard.heads.kv
        if part == "q_proj":
            return tensor[heads[0] * dim : heads[1] * dim]
        if part in ("k_proj", "v_proj"):
            return tensor[kv[0] * dim : kv[1] * dim]
        if part in ("gate_proj", "up_proj"):
            return self._rows(tensor, shard.config.intermediate_size)
        if part in ("embed_tokens", "lm_head"):
            return self._rows(tensor, shard.config.vocab_size)
        if part in ("o_proj", "down_proj"):
            if kind == "bias":  # added once
                return tensor if shard.split.ranks.rank == 0 else torch.zeros_like(tensor)
            if part == "o_proj":
                return tensor[:, heads[0] * dim : heads[1] * dim].contiguous()
            return self._columns(tensor, shard.config.intermediate_size)
        return tensor

    def _rows(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        """This rank's `count` rows; zeros behind the last of the model."""
        part = tensor[count * self._shard.split.ranks.rank :][:count]
        missing = count - part.shape[0]
        padding = (0, 0) * (tensor.dim() - 1) + (0, missing)
        return F.pad(part, padding) if missing else part

    def _columns(self, tensor: torch.Tensor, count: int) -> torch.Tensor:
        part = tensor[:, count * self._shard.split.ranks.rank :][:, :count]
        return F.pad(part, (0, count - part.shape[1])).contiguous()

    def __contains__(self, name: object) -> bool:
        return name in self._weights  # without cutting it

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
