"""What a session reports: an estimate, the outcome of a prefill, an answer."""

from __future__ import annotations

from dataclasses import dataclass

from tsdoc.evidence.results import Evidence
from tsdoc.kernels.memory_plan import MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a prefill will cost.

    Attributes:
        prompt_tokens: Tokens before the question.
        reused_tokens: Of these, the ones whose K and V the store holds.
        prefill_tokens: The rest.
        prefill_s: Seconds they will take, as measured before; None while nothing was.
        kv_bytes: Bytes of K and V that will be added to the store (or kept in memory without it).
        free_disk_bytes: What the store's disk has room for, besides what is reserved.
        memory_bytes: Memory the process had for itself in the longest prefill before; None while
            unknown.
        memory_tokens: Length of that prompt; 0 while unknown.
        device: What will lie in a GPU's memory, once the weights do; None unless it is limited.
    """

    prompt_tokens: int
    reused_tokens: int
    prefill_tokens: int
    prefill_s: float | None
    kv_bytes: int
    free_disk_bytes: int
    memory_bytes: int | None
    memory_tokens: int
    device: MemoryPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a prefill took: seconds, and the most memory the process had for itself meanwhile."""

    prefill_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What is available for questions now.

    Attributes:
        kept: Whether the next process can reuse it.
        estimate: Made before the prefill.
        outcome: What the prefill took; None where there was none.
    """

    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    kept: bool
    entry_id: str | None
    estimate: Estimate
    outcome: Outcome | None
    times_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer; token counts as in the JSON output.

    Attributes:
        finish_reason: "stop"; "length" when it was cut, "loop" when it said the same over and over,
            "interrupted" by Ctrl-C.
        reread_tokens: Of the prompt's, those that repeat before the question what it looks at.
        generated_tokens: With those that a loop repeated and `text` lacks.
        times_s: Seconds to the first token, for the rest of the answer, and for finding evidence.
            Those of the stages before are the session's.
        evidence: What the model looked at; None when it was not asked for.
    """

    question: str
    text: str
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int
    reread_tokens: int
    generated_tokens: int
    selection_steps: int
    selection_hits: int
    times_s: dict[str, float]
    evidence: Evidence | None = None
