"""What a prefill will cost, said before it, and what it did cost, said after it."""

from __future__ import annotations

import time
from types import TracebackType

from tsdoc.kernels.memory_plan import MemoryPlan
from tsdoc.progress import Reporter
from tsdoc.session.calibration import Calibration, PeakMemory
from tsdoc.session.results import Estimate, Outcome
from tsdoc.terminal import format_bytes, format_duration

LONG_PREFILL_S = 60.0


def describe_plan(plan: MemoryPlan) -> str:
    """One line: what lies where."""
    parts = [f"{format_bytes(plan.taken_bytes)} for the weights"]
    if plan.on_host:
        parts.append(f"{format_bytes(plan.index_bytes)} for the key index")
        parts.append(f"{format_bytes(plan.stage_bytes)} for keys of two layers")
    else:
        parts.append(f"{format_bytes(plan.kv_bytes)} for K and V")
    parts.append(f"{format_bytes(plan.work_bytes)} for the work")
    where = f"; K and V, {format_bytes(plan.kv_bytes)}, go to the machine's own memory"
    return (
        f"{format_bytes(plan.needed_bytes)} of {format_bytes(plan.total_bytes)} of the GPU's "
        f"memory: {', '.join(parts)}{where if plan.on_host else ''}"
    )


class Forecast:
    """Follows a prefill from its first token to its last; a context manager around it.

    Where it takes more than a minute, one line says beforehand how long and what it needs: from
    what this machine was measured to do, or else from the first block. One line says afterwards how
    long it took. The next estimate learns from it.

    Args:
        estimate: Of this prefill.
        calibration: Takes the outcome.
        reporter: Is told.
        kept: Whether a Ctrl-C loses nothing.
        narrowing: The options that make this document smaller, "" where none does.
    """

    def __init__(
        self,
        estimate: Estimate,
        calibration: Calibration,
        reporter: Reporter,
        *,
        kept: bool,
        narrowing: str = "",
    ) -> None:
        self._estimate = estimate
        self._calibration = calibration
        self._reporter = reporter
        self._kept = kept
        self._narrowing = narrowing
        self._said_s: float | None = None
        self._end = estimate.reused_tokens
        self._took_s = 0.0
        # Tokens and seconds that the rate is counted from: a GPU's first block compiles kernels.
        self._warm: tuple[int, float] | None = None
        if calibration.device == "cpu":
            self._warm = (estimate.reused_tokens, 0.0)
        self._memory = PeakMemory()
        self.outcome: Outcome | None = None

    def __enter__(self) -> Forecast:
        estimate = self._estimate
        self._reporter.advance(estimate.reused_tokens)
        if estimate.prefill_s is not None and estimate.prefill_s >= LONG_PREFILL_S:
            self._say(estimate.prefill_s, estimate.prefill_tokens / estimate.prefill_s)
        self._memory.__enter__()
        self._begun = time.perf_counter()
        return self

    def advance(self, end: int) -> None:
        """Takes the block that ends at `end` as computed and kept."""
        self._reporter.advance(end)
        self._end = end
        estimate = self._estimate
        self._took_s = time.perf_counter() - self._begun
        if self._warm is None:
            self._warm = (end, self._took_s)
            return
        rate = (end - self._warm[0]) / (self._took_s - self._warm[1])
        left_s = (estimate.prompt_tokens - end) / rate
        if self._said_s is None and left_s >= LONG_PREFILL_S:
            self._say(left_s, rate)

    def _say(self, seconds: float, rate: float) -> None:
        self._said_s = self._took_s + seconds  # of all that is compared with it at the end
        estimate = self._estimate
        parts = []
        if self._kept:
            free = estimate.free_disk_bytes
            disk = format_bytes(estimate.kv_bytes)
            parts.append(f"{disk} of disk ({format_bytes(free)} still free)")
        if estimate.memory_bytes is not None:
            shorter = self._kept and estimate.prompt_tokens <= estimate.memory_tokens
            about = "up to" if shorter else "at least"
            parts.append(f"{about} {format_bytes(estimate.memory_bytes)} of memory")
        keep = "Ctrl-C is safe" if self._kept else "nothing is kept"
        self._reporter.note(
            f"{estimate.prompt_tokens - self._end:,} tokens to read: about "
            f"{format_duration(seconds)} at {rate:,.0f} tokens/s"
            + "".join(f", {part}" for part in parts)
            + f"; {keep}"
            + (f"; {self._narrowing} reads less" if self._narrowing else "")
        )
        if estimate.device is not None:
            self._reporter.note(describe_plan(estimate.device))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        took_s = self._took_s  # a block that was left unfinished does not count
        self._memory.__exit__(kind, error, trace)
        estimate = self._estimate
        num_tokens = self._end - estimate.reused_tokens
        if self._warm is not None and self._end > self._warm[0]:
            tokens, seconds = self._end - self._warm[0], took_s - self._warm[1]
            self._calibration.note(
                tokens,
                seconds,
                memory_bytes=self._memory.peak_bytes if self._kept else None,
                prompt_tokens=self._end,
            )
        if error is not None:
            return
        self.outcome = Outcome(prefill_s=took_s, memory_bytes=self._memory.peak_bytes)
        if self._said_s is not None:
            self._reporter.note(
                f"read {num_tokens:,} tokens in {format_duration(took_s)} "
                f"({format_duration(self._said_s)} estimated), "
                f"{format_bytes(self._memory.peak_bytes)} of memory"
            )
