"""What is asked of an evaluation, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tsdoc.eval.background import Kind
from tsdoc.eval.fidelity import Fidelity
from tsdoc.eval.results import Cell, ItemResult
from tsdoc.kernels.devices import Device

WHOLE = 0  # a length: the whole document
DEFAULT_TASKS = ("niah_single_2", "niah_multikey_1")
DEFAULT_LENGTHS: dict[Device, tuple[int, ...]] = {
    "cpu": (4096, 8192),
    "cuda": (8192, 32_768, 131_072),
}
DEFAULT_ITEMS: dict[Device, int] = {"cpu": 10, "cuda": 20}
DEFAULT_HAYSTACKS: dict[Device, int] = {"cpu": 1, "cuda": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """What the user asked for; None is the default for device and document.

    Attributes:
        lengths: In tokens; `WHOLE` is the whole document.
        policies: As `parse_policy` reads them.
        sources: A document of the user's to hide things in.
        files: Files of InfiniteBench, RULER or LongBench; they replace the generated tasks unless
            `tasks` names some as well.
        fidelity: Compare policies with full attention token by token, and run no tasks.
        out: Where results are kept; None is a file under the home.
    """

    tasks: tuple[str, ...] | None = None
    lengths: tuple[int, ...] | None = None
    policies: tuple[str, ...] = ("tokenselect",)
    items: int | None = None
    haystacks: int | None = None
    seed: int = 0
    backgrounds: tuple[Kind, ...] = ()
    fidelity: bool = False
    sources: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    out: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far a policy is from the first one on the items both answered, with a 95 % interval."""

    policy: str
    other: str
    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """The outcome.

    Attributes:
        document: Name of the user's document; None without one.
        document_tokens: Its length.
        path: Where the results are kept.
    """

    model: str
    licence: str | None
    device: str
    window: int
    document: str | None
    document_tokens: int
    cells: tuple[Cell, ...]
    differences: tuple[Difference, ...]
    items: tuple[ItemResult, ...]
    fidelity: tuple[Fidelity, ...]
    path: Path | None
