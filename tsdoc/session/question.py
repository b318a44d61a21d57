"""A question as the engine takes it: ids behind prompt and conversation, and how to answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tsdoc.errors import ResourceError
from tsdoc.prompt.assemble import Prompt
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.session.limits import check_length
from tsdoc.session.tail import Tail
from tsdoc.settings import Settings

if TYPE_CHECKING:
    from tsdoc.engine.generate import GenerationConfig
    from tsdoc.engine.reread import Reread


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """One question.

    Attributes:
        ids: What is computed before the answer: of the conversation what is not yet, and the
            question.
        num_asked: How many of them, at the end, are the question's own.
        start: Position of the first.
        room: Tokens that they, what is read again and the answer take at most.
        config: How it is answered.
    """

    ids: list[int]
    num_asked: int
    start: int
    room: int
    config: GenerationConfig


def lay_out(
    question: str,
    before: Tail,
    *,
    prompt: Prompt,
    template: ChatTemplate,
    settings: Settings,
    stop_ids: frozenset[int],
    max_new_tokens: int | None,
    allowed: Sequence[tuple[int, int]] | None,
    keep_queries: bool,
    reread: Reread | None,
) -> LaidOut:
    """Puts a question behind a prompt and a conversation.

    Args:
        question: Its text.
        before: The conversation, which may be empty.
        prompt: The document.
        template: What stands between them.
        settings: How answers are generated, and how long all may be.
        stop_ids: Tokens that end an answer.
        max_new_tokens: Instead of the settings' value.
        allowed: Prompt positions that may be selected, beside all that stands behind the prompt.
        keep_queries: See `GenerationConfig`.
        reread: What may be read again before the question.

    Raises:
        ResourceError: prompt, question and answer exceed max_prompt_tokens.
        ModelError: the model's template allows no second question.
    """
    from tsdoc.engine.generate import GenerationConfig
    from tsdoc.engine.sampling import SamplingConfig

    encode = template.turn_ids if before.ids else template.question_ids
    asked = [int(token) for token in encode(question)]
    ids = before.ids[before.num_cached :] + asked
    start = len(prompt.ids) + before.num_cached
    options = settings.answer
    max_new_tokens = max_new_tokens or options.max_new_tokens
    room = len(ids) + (reread.room if reread else 0) + max_new_tokens
    _check_length(start + room, before, prompt, settings)
    behind = (len(prompt.ids), start + room)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        allowed=None if allowed is None else [*allowed, behind],
        keep_queries=keep_queries,
        reread=reread,
        reread_at=len(ids) - len(asked) + (template.turn_lead if before.ids else 0),
        stop_ids=stop_ids,
        question_chunk_size=settings.engine.question_chunk_size,
        theta=settings.engine.theta,
        sampling=SamplingConfig(
            temperature=options.temperature, top_p=options.top_p, seed=options.seed
        ),
    )
    return LaidOut(ids=ids, num_asked=len(asked), start=start, room=room, config=config)


def _check_length(num_tokens: int, before: Tail, prompt: Prompt, settings: Settings) -> None:
    limit = settings.prompt.max_prompt_tokens
    if before.ids and num_tokens > limit:
        raise ResourceError(
            f"the document and this conversation, with room for an answer, are {num_tokens:,} "
            f"tokens long and the limit is {limit:,}",
            hint="Begin a new conversation, or allow more with --set max_prompt_tokens=N.",
        )
    check_length(num_tokens, limit, prompt)
