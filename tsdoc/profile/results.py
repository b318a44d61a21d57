"""What a profile found. Every figure says its unit: seconds, milliseconds, bytes, ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

PARTS = ("linear", "selection", "attention", "store", "other")
"""What a prefill is split into; `other` is what no operation accounts for."""

SweepOption = Literal["top_k", "theta", "chunk"]


ABOVE_CEILINGS = (
    "More than 100 %: ceilings are measured with a copy and a product that no processor cache "
    "holds, and with one large file. Work that finds its data in a cache can be faster, and rates "
    "change while other work runs."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it was measured; `gpu` and its memory are None on a CPU."""

    cpu: str
    num_cores: int
    memory_bytes: int
    gpu: str | None
    gpu_bytes: int | None
    system: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One prefill block, up to token `end`."""

    end: int
    num_tokens: int
    seconds: float
    parts_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    """The whole prefill, with K and V kept in memory.

    Attributes:
        parts_s: Seconds by kind of work; the names are `PARTS`.
        warm_up_s: Spent before, on compiling kernels and on first calls; not part of `seconds`.
    """

    num_tokens: int
    block_tokens: int
    seconds: float
    warm_up_s: float
    parts_s: dict[str, float]
    blocks: tuple[Block, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the whole prompt."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """Decode steps behind the whole prompt.

    Attributes:
        name: What was asked of the Selection Cache.
        theta: Its threshold; None switches it off.
        first_token_s: From the question to the answer's first token, K and V in place.
        steps_ms: Milliseconds of each step that counts.
        lookups: Selections asked for, over all layers and steps.
        hits: Those answered by the last selection.
    """

    name: str
    theta: float | None
    first_token_s: float
    steps_ms: tuple[float, ...]
    lookups: int
    hits: int

    @property
    def p50_ms(self) -> float:
        """Median step."""
        return percentile(self.steps_ms, 0.5)

    @property
    def p95_ms(self) -> float:
        """95th percentile of the steps."""
        return percentile(self.steps_ms, 0.95)

    @property
    def hit_ratio(self) -> float | None:
        """Hits per look-up; None where everything is attended and nothing is selected."""
        return self.hits / self.lookups if self.lookups else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device can do at best, measured in the same run."""

    copy_bytes_per_s: float
    flops_per_s: float
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kind of work beside its floor: the least time that its bytes or operations take."""

    name: str
    phase: Literal["prefill", "decode"]
    seconds: float
    num_bytes: float
    num_flops: float
    floor_s: float
    bound: Literal["memory", "compute"]

    @property
    def share(self) -> float:
        """Floor over measured time: 1.0 is the roofline."""
        return self.floor_s / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """Full attention over the same prompt.

    Attributes:
        samples: (cached tokens, milliseconds) of one chunk's attention in one layer.
        method: How the totals were come by, in a sentence.
    """

    prefill_s: float
    decode_ms: float
    prefill_speedup: float
    decode_speedup: float
    samples: tuple[tuple[int, float], ...]
    measured: bool
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """K and V of the prompt written to a store on this disk."""

    num_bytes: int
    write_s: float
    disk_bytes_per_s: float
    open_s: float

    @property
    def bytes_per_s(self) -> float:
        """The store's write rate, checksums and fsync included."""
        return self.num_bytes / self.write_s

    @property
    def ratio(self) -> float:
        """The store's rate over the disk's."""
        return self.bytes_per_s / self.disk_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    """A new process that finds the entry; seconds of each stage, in order.

    Attributes:
        stages_s: "python", "imports", "model", "open", "first token".
    """

    stages_s: dict[str, float]

    @property
    def first_token_s(self) -> float:
        """From the start of the process."""
        return sum(self.stages_s.values())

    @property
    def after_weights_s(self) -> float:
        """From the moment the weights are loaded."""
        return self.stages_s["open"] + self.stages_s["first token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FromDisk:
    """The same when nothing of the entry is in the page cache.

    Attributes:
        start: Its stages.
        num_bytes: K and V of the entry.
        disk_bytes_per_s: What the disk gave just before, the same file read by itself.
    """

    start: Warm
    num_bytes: int
    disk_bytes_per_s: float

    @property
    def ratio(self) -> float:
        """From the weights to the first token, over what the disk needs for all of K and V."""
        return self.start.after_weights_s / (self.num_bytes / self.disk_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One value of one option; what does not fit the model's window has only a note."""

    option: SweepOption
    value: float | None
    prefill_tokens_per_s: float | None = None
    decode_ms: float | None = None
    hit_ratio: float | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that one `tsdoc profile` found.

    Attributes:
        cold_s: Stages from nothing to the first token, in order.
        notes: What could not be measured, or does not show, and why.
    """

    model: str
    random_weights: bool
    source: str
    num_tokens: int
    num_layers: int
    command: str
    machine: Machine
    device: str
    compute_dtype: str
    kv_dtype: str
    kv_bytes_per_token: int
    selection: dict[str, object]
    theta: float | None
    ceilings: Ceilings
    cold_s: dict[str, float]
    prefill: PrefillResult
    decode: tuple[DecodeRun, ...]
    theta_curve: tuple[DecodeRun, ...]
    kernels: tuple[Kernel, ...]
    host_peak_bytes: int
    device_peak_bytes: int | None
    kept: Kept | None = None
    warm: Warm | None = None
    from_disk: FromDisk | None = None
    full: Full | None = None
    sweeps: tuple[SweepRow, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def above_ceilings(self) -> str | None:
        """Says how a share can be more than 100 %, where one is shown that is."""
        shares = [kernel.share for kernel in self.kernels]
        shares += [self.kept.ratio] if self.kept is not None else []
        return ABOVE_CEILINGS if any(share >= 1.005 for share in shares) else None

    @property
    def first_token_cold_s(self) -> float:
        """From the start of the process, with nothing kept from before."""
        return sum(self.cold_s.values())


def percentile(values: Sequence[float], share: float) -> float:
    """Linearly interpolated percentile of a non-empty sequence."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
