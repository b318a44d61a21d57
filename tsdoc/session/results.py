"""What a session reports: an estimate, the outcome of a prefill, an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a prefill will cost.

    Attributes:
        prompt_tokens: Tokens before the question.
        reused_tokens: Of these, the ones whose K and V the store holds.
        prefill_tokens: The rest.
        kv_bytes: Bytes of K and V that will be added to the store.
    """

    prompt_tokens: int
    reused_tokens: int
    prefill_tokens: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The outcome of a prefill; `kept` tells whether the next process can reuse it."""

    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    kept: bool
    entry_id: str | None
    times_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer; token counts as in the JSON output.

    Attributes:
        times_s: Seconds to the first token, and for the rest of the answer. Those of the stages
            before are the session's.
    """

    question: str
    text: str
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    selection_steps: int
    selection_hits: int
    times_s: dict[str, float]
