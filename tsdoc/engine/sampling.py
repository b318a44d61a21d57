"""Choosing the next token from its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Temperature 0 is greedy; `top_p` keeps the smallest set of tokens of that probability."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Sampler:
    """Draws tokens; the same seed and logits give the same tokens."""

    def __init__(self, config: SamplingConfig) -> None:
        self._config = config
        self._generator = torch.Generator().manual_seed(config.seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """Returns a token id for `logits` [vocab_size] float32; equals go to the lower id."""
        config = self._config
        if config.temperature == 0.0:
            return int(torch.argmax(logits))
        probabilities = torch.softmax(logits.cpu() / config.temperature, dim=-1)
        ordered, ids = torch.sort(probabilities, descending=True, stable=True)
        # A token stays while those before it have not yet reached top_p; the first always stays.
        before = torch.cumsum(ordered, dim=0) - ordered
        kept = ordered.masked_fill(before >= config.top_p, 0.0)
        return int(ids[torch.multinomial(kept, 1, generator=self._generator)])
