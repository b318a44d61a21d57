"""The small interface of a policy that does not ship, and the run that drives it.

A policy says what the tokens of one forward pass attend to; embeddings, projections, MLP and logits
are the engine's own decoder.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tsdoc.engine.forward import Ranges, chunk_bounds
from tsdoc.eval.policies.cache import PolicyCache
from tsdoc.eval.policies.interface import Followed, ModelContext, Reply
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.piece_rows import as_tensor
from tsdoc.kernels.rope import RopeTable, make_rope_table
from tsdoc.models.config import ModelConfig
from tsdoc.prompt.tokenizer import Ids
from tsdoc.settings import SelectionSettings

ROOM = 2048  # tokens that questions and answers add to a haystack at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a policy is told before a haystack.

    Attributes:
        budget: The settings whose n_init, n_local and top_k bound what a token attends to.
        num_tokens: Length of the haystack.
    """

    config: ModelConfig
    budget: SelectionSettings
    device: torch.device
    num_tokens: int

    @property
    def num_positions(self) -> int:
        """Positions that haystack, question and answer take."""
        return self.num_tokens + ROOM

    def rope(self, num_positions: int, *, theta: float | None = None) -> RopeTable:
        """A table of so many positions, with the model's theta or another."""
        rope = self.config.rope
        if theta is not None:
            rope = dataclasses.replace(rope, theta=theta)
        return make_rope_table(rope, self.config.head_dim, num_positions, self.device)


class AttentionPolicy(Protocol):
    """Decides what tokens attend to."""

    def begin(self, scene: Scene) -> None:
        """A haystack begins; what is known of the last one is forgotten."""

    def attend(
        self, layer: int, q: torch.Tensor, cache: PolicyCache, chunks: Ranges
    ) -> torch.Tensor:
        """Attention of consecutive tokens, whose K and V have been written.

        Args:
            layer: Whose keys and values.
            q: [num_tokens, num_qo_heads, head_dim], before RoPE.
            cache: Holds everything up to the last of the tokens.
            chunks: Position ranges that cover the tokens; those of a chunk may share a selection.

        Returns:
            [num_tokens, num_qo_heads, head_dim].
        """

    def rewind(self, end: int) -> None:
        """Positions from `end` on are about to be written anew."""


class PolicyRun:
    """See `Contender`: any policy on the shipped decoder.

    Args:
        context: Model and settings.
        policy: What tokens attend to.
        budget: Selection settings of this policy.
    """

    def __init__(
        self, context: ModelContext, policy: AttentionPolicy, budget: SelectionSettings
    ) -> None:
        self._context = context
        self._policy = policy
        self._budget = budget
        self._num_tokens = 0
        engine, decoder = context.settings.engine, context.decoder
        self._cache = PolicyCache(
            context.config,
            kv_dtype=torch.float32 if engine.kv_dtype == "float32" else torch.bfloat16,
            compute_dtype=decoder.dtype,
            device=context.backend.device,
        )

    def prefill(self, ids: Ids, on_tokens: Callable[[int], None]) -> None:
        """See `Contender.prefill`."""
        self._begin(len(ids))
        for first, last in chunk_bounds(0, len(ids), self._context.settings.engine.prefill_block):
            chunks = chunk_bounds(first, last, self._budget.chunk_size)
            self.forward(ids[first:last], first, chunks, num_logits=0)
            on_tokens(last)
        self._cache.sealed = len(ids)
        torch.zeros(1, device=self._cache.device).item()  # waits for the device

    def adopt(self, piece: KVPiece, num_tokens: int) -> None:
        """Takes the K and V that another policy's prefill wrote to `piece`."""
        self._begin(num_tokens)
        for layer in range(self._context.config.num_layers):
            k, v = as_tensor(piece.keys(layer)), as_tensor(piece.values(layer))
            k, v = (rows[:num_tokens].to(self._cache.device) for rows in (k, v))
            self._cache.write(layer, 0, k, v)
        self._cache.sealed = num_tokens

    def _begin(self, num_tokens: int) -> None:
        self._cache.sealed = None
        self._cache.reserve(num_tokens + ROOM)
        self._num_tokens = num_tokens
        self._policy.begin(
            Scene(
                config=self._context.config,
                budget=self._budget,
                device=self._cache.device,
                num_tokens=num_tokens,
            )
        )

    def answer(self, question: Ids, max_new_tokens: int) -> Reply:
        """See `Contender.answer`."""
        stop_ids = self._context.config.eos_token_ids
        start = self._num_tokens
        position = start + len(question)
        self._cache.reserve(position + max_new_tokens)
        self._policy.rewind(start)
        begun = time.perf_counter()
        size = self._context.settings.engine.question_chunk_size
        chunks = chunk_bounds(start, position, size, start)
        token = int(self.forward(question, start, chunks, num_logits=1)[0].argmax())
        first = time.perf_counter()
        tokens: list[int] = []
        while token not in stop_ids:
            tokens.append(token)
            if len(tokens) == max_new_tokens:
                break
            step = [(position, position + 1)]
            ids = np.array([token], dtype=np.int32)
            token = int(self.forward(ids, position, step, num_logits=1)[0].argmax())
            position += 1
        return Reply(
            tokens=tuple(tokens), first_s=first - begun, decode_s=time.perf_counter() - first
        )

    def follow(self, ids: Ids) -> Followed:
        """See `Contender.follow`."""
        start = self._num_tokens
        self._cache.reserve(start + len(ids))
        self._policy.rewind(start)
        rows = [
            self.forward(ids[n : n + 1], start + n, [(start + n, start + n + 1)], num_logits=1)
            for n in range(len(ids))
        ]
        return Followed(logits=torch.cat(rows).cpu())

    @torch.inference_mode()
    def forward(self, ids: Ids, start: int, chunks: Ranges, *, num_logits: int) -> torch.Tensor:
        """Runs tokens through all layers; returns logits [num_logits, vocab_size] of the last."""
        cache, steps = self._cache, self._context.steps
        decoder = steps if steps is not None and len(ids) == 1 else self._context.decoder
        hidden = decoder.embed(torch.from_numpy(ids.astype(np.int64)))
        last_layer = decoder.config.num_layers - 1
        for layer in range(decoder.config.num_layers):
            q, k, v = decoder.project(layer, hidden)
            cache.write(layer, start, k, v)
            # A prefill has no use for the last layer's attention, but a policy may learn from it.
            attention = self._policy.attend(layer, q, cache, chunks)
            if layer == last_layer and num_logits == 0:
                return hidden[:0]
            attention = attention.to(decoder.dtype).contiguous()
            hidden = decoder.finish_layer(layer, hidden, attention)
        return decoder.logits(hidden[-num_logits:])
