"""Answering: the question's chunks, then one token after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from tsdoc.engine.evidence import Copy
from tsdoc.engine.forward import Ranges, Runner, blocks, chunk_bounds
from tsdoc.engine.query_log import QueryLog
from tsdoc.engine.reread import Reread
from tsdoc.engine.sampling import Sampler, SamplingConfig
from tsdoc.engine.selection_cache import MAX_HITS, SelectionCache
from tsdoc.kernels.interface import DeviceCache, DeviceDecode


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How one answer is generated.

    Attributes:
        max_new_tokens: Answer tokens at most.
        stop_ids: Any of these ends the answer and is not part of it.
        question_chunk_size: Question tokens that share one selection.
        theta: Selection Cache threshold; None switches it off.
        allowed: Restricts selection to these position ranges.
        keep_queries: Keeps those of the question's last chunk and of the answer.
        reread: What may be repeated before the question.
        reread_at: Where in the question's tokens it is put.
    """

    max_new_tokens: int
    stop_ids: frozenset[int]
    question_chunk_size: int
    theta: float | None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    allowed: Ranges | None = None
    keep_queries: bool = False
    reread: Reread | None = None
    reread_at: int = 0


@dataclass(slots=True, kw_only=True)
class Generation:
    """One answer under way: iterate over it to get token ids.

    Attributes:
        question: Token ids before the answer, with what was read again.
        copies: Which of them stand in the prompt already.
        tokens: Ids generated so far, without the stop token.
        end: K and V of [start, end) are computed; those of the last token may not be.
        finish_reason: "stop" or "length"; None while it goes on.
        reuse: The answer's Selection Cache, with its counts of look-ups and hits.
        log: The queries of the question's last chunk and of the answer, where they are kept.
    """

    runner: Runner
    cache: DeviceCache
    question: Sequence[int]
    start: int
    config: GenerationConfig
    copies: Sequence[Copy] = ()
    tokens: list[int] = field(default_factory=list)
    end: int = field(init=False)
    finish_reason: Literal["stop", "length"] | None = None
    reuse: SelectionCache | DeviceDecode = field(init=False)
    log: QueryLog | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.reuse = self._selection_cache()
        self.end = self.start

    def keep(self) -> None:
        """Brings K and V of [start, end) into the pieces, for what is asked next."""
        self.runner.save(self.cache, self.start, self.end).wait()

    def __iter__(self) -> Iterator[int]:
        config = self.config
        rest = self._read_again()
        position = self.start + len(self.question)
        size = config.question_chunk_size
        chunks = [
            *chunk_bounds(self.start, rest, size, self.start),
            *chunk_bounds(rest, position, size, rest),
        ]
        logits: torch.Tensor | None = None
        log = self.log = self._open_log(chunks[-1]) if config.keep_queries else None
        for block in blocks(chunks):
            first, last = block[0][0], block[-1][1]
            logits = self.runner.run_chunks(
                self.cache,
                torch.tensor(self.question[first - self.start : last - self.start]),
                first,
                block,
                allowed=config.allowed,
                need_logits=last == position,
                log=log if last == position else None,
            )
            self.end = last
        sampler = Sampler(config.sampling)
        reuse = self._selection_cache()
        decode = self.cache.start_decode(
            position, theta=config.theta, max_hits=MAX_HITS, allowed=config.allowed
        )
        self.reuse = decode or reuse
        while logits is not None:
            token = sampler(logits)
            if token in config.stop_ids:
                self.finish_reason = "stop"
                return
            self.tokens.append(token)
            yield token
            if len(self.tokens) == config.max_new_tokens:
                self.finish_reason = "length"
                return
            if decode is not None:
                logits = self.runner.run_device_step(decode, token, log=log)
            else:
                logits = self.runner.run_step(
                    self.cache, token, position, reuse, allowed=config.allowed, log=log
                )
            position += 1
            self.end = position
            if log is not None:
                log.end = position

    def _selection_cache(self) -> SelectionCache:
        return SelectionCache(self.config.theta, self.runner.team.mesh)

    def _read_again(self) -> int:
        """Puts what is to be read again into the question; returns where the rest of it begins."""
        config = self.config
        if config.reread is None:
            return self.start
        stretches = config.reread.find(
            self.runner,
            self.cache,
            self.question,
            self.start,
            question_chunk_size=config.question_chunk_size,
            asked_from=config.reread_at,
        )
        if not stretches:
            return self.start
        before, after = self.question[: config.reread_at], self.question[config.reread_at :]
        again, self.copies = config.reread.repeat(stretches, self.start + len(before))
        self.question = [*before, *again, *after]
        return self.start + len(before) + len(again)

    def _open_log(self, last_chunk: tuple[int, int]) -> QueryLog:
        start, end = last_chunk
        return QueryLog(
            self.runner.decoder,
            start=start,
            question_end=end,
            num_tokens=end - start + self.config.max_new_tokens,
            device=self.runner.rope.cos.device,
        )
