"""TokenSelect as it ships: the engine itself, with any of its settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tsdoc.eval.policies.interface import SHORTER, Followed, ModelContext, Reply
from tsdoc.kernels.devices import Device
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.shared_kv import make_piece
from tsdoc.prompt.tokenizer import Ids
from tsdoc.session.memory import check_kv_memory
from tsdoc.session.resolving import index_config, kv_shape, reread_tokens
from tsdoc.settings import Settings

if TYPE_CHECKING:
    from tsdoc.engine.reread import Reread


class TokenSelect:
    """See `Contender`; K and V are kept in memory alone.

    Args:
        context: Model and settings.
        changes: Settings of this policy, by group.
        on_host: Whether a haystack's K and V are wanted in the machine's own memory.

    Attributes:
        piece: K and V of the haystack.
    """

    def __init__(
        self,
        context: ModelContext,
        changes: Mapping[str, Mapping[str, object]],
        *,
        on_host: bool = False,
    ) -> None:
        from tsdoc.engine.engine import Engine
        from tsdoc.kernels.selection import SelectionConfig

        self._context = context
        self._device: Device = "cuda" if context.backend.device.type == "cuda" else "cpu"
        self._place: Device = "cpu" if on_host else self._device
        self._settings = change_settings(context.settings, changes)
        self._engine = Engine(
            context.decoder,
            SelectionConfig(**self._settings.selection.model_dump()),
            max_tokens=context.max_tokens,
            question_chunk_size=self._settings.engine.question_chunk_size,
            backend=context.backend,
            steps=context.steps,
            index=index_config(self._settings.engine, self._device),
        )
        self.piece = self._make_piece(0, 1)
        self._reread: Reread | None = None
        self._num_tokens = 0

    def prefill(self, ids: Ids, on_tokens: Callable[[int], None]) -> None:
        """See `Contender.prefill`."""
        import torch

        from tsdoc.engine.evidence import make_neutral
        from tsdoc.engine.reread import make_reread

        context, kv_dtype = self._context, self._settings.engine.kv_dtype
        if self._device == "cpu":  # a GPU checks its own
            check_kv_memory(len(ids), kv_shape(context.config, kv_dtype), "cpu", hint=SHORTER)
        self.piece, self._num_tokens = self._make_piece(0, len(ids)), len(ids)
        self._engine.prefill(
            [self.piece],
            ids,
            0,
            prefill_block=self._settings.engine.prefill_block,
            on_block=on_tokens,
        )
        torch.zeros(1, device=self._context.backend.device).item()  # waits for the device
        self._engine.index_piece(self.piece)
        template = self._context.template
        num_tokens = reread_tokens(self._settings.engine, self._device)
        neutral = make_neutral(template, (template.head_ids.size, len(ids)), len(ids))
        self._reread = make_reread(template, ids, neutral, num_tokens)

    def answer(self, question: Ids, max_new_tokens: int) -> Reply:
        """See `Contender.answer`."""
        from tsdoc.engine.generate import GenerationConfig

        start = self._num_tokens
        room = self._reread.room if self._reread else 0
        tail = self._make_piece(start, room + len(question) + max_new_tokens)
        watch = self._engine.index
        before = (watch.num_samples, watch.sum_of_shares) if watch else (0, 0.0)
        begun = time.perf_counter()
        first = begun
        generation = self._engine.generate(
            [self.piece, tail],
            question.tolist(),
            start,
            GenerationConfig(
                max_new_tokens=max_new_tokens,
                stop_ids=frozenset(self._context.config.eos_token_ids),
                question_chunk_size=self._settings.engine.question_chunk_size,
                theta=self._settings.engine.theta,
                reread=self._reread,
            ),
        )
        for count, _ in enumerate(generation):
            if count == 0:
                first = time.perf_counter()
        ended = time.perf_counter()
        first = first if generation.tokens else ended
        return Reply(
            tokens=tuple(generation.tokens),
            first_s=first - begun,
            decode_s=ended - first,
            lookups=generation.reuse.num_lookups,
            hits=generation.reuse.num_hits,
            sampled=watch.num_samples - before[0] if watch else 0,
            caught=watch.sum_of_shares - before[1] if watch else 0.0,
        )

    def follow(self, ids: Ids) -> Followed:
        """See `Contender.follow`."""
        import torch

        from tsdoc.engine.selection_cache import MAX_HITS, SelectionCache

        start, theta = self._num_tokens, self._settings.engine.theta
        cache = self._engine.cache([self.piece, self._make_piece(start, len(ids))])
        cache.load(start)
        runner, reuse = self._engine.runner, SelectionCache(theta)
        first = torch.from_numpy(ids[:1].astype("int64"))
        logits = runner.run_chunks(cache, first, start, [(start, start + 1)], need_logits=True)
        assert logits is not None  # noqa: S101 - they were asked for
        rows = [logits.cpu()]
        decode = cache.start_decode(start + 1, theta=theta, max_hits=MAX_HITS, allowed=None)
        for position, token in enumerate(ids[1:].tolist(), start + 1):
            if decode is not None:
                logits = runner.run_device_step(decode, token)
            else:
                logits = runner.run_step(cache, token, position, reuse)
            rows.append(logits.cpu())
        counts = decode or reuse
        return Followed(logits=torch.stack(rows), lookups=counts.num_lookups, hits=counts.num_hits)

    def _make_piece(self, start: int, capacity: int) -> KVPiece:
        config = self._context.config
        return make_piece(
            self._place,
            start=start,
            capacity=capacity,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            kv_dtype=self._settings.engine.kv_dtype,
        )


def change_settings(settings: Settings, changes: Mapping[str, Mapping[str, object]]) -> Settings:
    """Returns settings with some values changed, checked as those of the user are."""
    values = settings.model_dump()
    for group, entries in changes.items():
        values[group] = {**values[group], **entries}
    return Settings.model_validate(values)
