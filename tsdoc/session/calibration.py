"""What this machine was measured to do: the next prefill's time and memory, known beforehand.

`TSDOC_HOME/calibration.json` holds, per model key, device and number of threads, the rate of the
last prefills and the memory that the longest took. Whatever is wrong with it, it is as if nothing
were known.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TypeGuard

from tsdoc.errors import ResourceError, StoreError
from tsdoc.home import Home, private_dir
from tsdoc.kernels.devices import resolve_device
from tsdoc.prompt.files import read_checked, write_checked
from tsdoc.settings import Settings

MIN_TOKENS = 512  # fewer say too little about the rate
MAX_MEASURED = 64
SAMPLE_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What prefills took.

    Attributes:
        tokens_per_s: The mean of the last one and of what was known before it.
        memory_bytes: Most memory that the process had for itself during the one of the longest
            prompt, of those that kept K and V on disk; None while there was none.
        memory_tokens: Length of that prompt.
    """

    tokens_per_s: float
    memory_bytes: int | None
    memory_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What is known of one way to prefill.

    Attributes:
        home: Where it is kept.
        model_key: Digest of the model key.
        device: "cpu" or "cuda".
        threads: CPU threads.
        num_ranks: Processes that compute together.
    """

    home: Home
    model_key: str
    device: str
    threads: int
    num_ranks: int = 1

    @classmethod
    def of(cls, settings: Settings, *, home: Home, model_key: str) -> Calibration:
        """That of a prefill with `settings`."""
        return cls(
            home=home,
            model_key=model_key,
            device=resolve_device(settings.engine.device),
            threads=settings.engine.threads or num_cpus(),
            num_ranks=settings.parallel.size,
        )

    @property
    def name(self) -> str:
        """What the figures are found by."""
        ranks = f" x{self.num_ranks}" if self.num_ranks > 1 else ""
        return f"{self.model_key} {self.device} {self.threads}{ranks}"

    def read(self) -> Measured | None:
        """Returns what was measured before; None where nothing was."""
        return read_all(self.home).get(self.name)

    def note(
        self, num_tokens: int, seconds: float, *, memory_bytes: int | None, prompt_tokens: int
    ) -> None:
        """Takes the outcome of a prefill; what cannot be kept is not.

        Args:
            num_tokens: That were computed.
            seconds: It took.
            memory_bytes: Most memory of the process meanwhile; None where K and V were part of it.
            prompt_tokens: Up to where the prompt was computed.
        """
        if num_tokens < MIN_TOKENS or seconds <= 0:
            return
        known = read_all(self.home)
        before = known.pop(self.name, None)
        rate = num_tokens / seconds
        measured = Measured(
            tokens_per_s=rate,
            memory_bytes=memory_bytes,
            memory_tokens=0 if memory_bytes is None else prompt_tokens,
        )
        if before is not None:
            measured = replace(measured, tokens_per_s=(rate + before.tokens_per_s) / 2)
            if before.memory_tokens > measured.memory_tokens:  # the longer one says more
                measured = replace(before, tokens_per_s=measured.tokens_per_s)
        known[self.name] = measured
        latest = list(known.items())[-MAX_MEASURED:]
        with contextlib.suppress(ResourceError, StoreError):
            private_dir(self.home.root)
            write_checked(
                _path(self.home), {"measured": {name: asdict(one) for name, one in latest}}
            )


def read_all(home: Home) -> dict[str, Measured]:
    """Returns everything that was measured on this machine, by `Calibration.name`."""
    value = read_checked(_path(home))
    measured = value.get("measured") if value is not None else None
    if not isinstance(measured, dict):
        return {}
    found = {name: _parse(fields) for name, fields in measured.items()}
    return {name: one for name, one in found.items() if one is not None}


def read_rates(home: Home) -> dict[str, float]:
    """Returns tokens per second by model key, as measured last."""
    return {name.split()[0]: one.tokens_per_s for name, one in read_all(home).items()}


def num_cpus() -> int:
    """Returns how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _parse(fields: object) -> Measured | None:
    if not isinstance(fields, Mapping):
        return None
    rate, memory = fields.get("tokens_per_s"), fields.get("memory_bytes")
    if not isinstance(rate, int | float) or not math.isfinite(rate) or rate <= 0:
        return None
    if memory is not None and not _is_count(memory):
        return None
    length = fields.get("memory_tokens", 0)  # older figures lack it, and any other replaces them
    if not _is_count(length):
        return None
    return Measured(tokens_per_s=float(rate), memory_bytes=memory, memory_tokens=length)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < 1 << 60


def _path(home: Home) -> Path:
    return home.root / "calibration.json"


class PeakMemory:
    """While entered, watches how much memory the process has for itself (not mapped files).

    Attributes:
        peak_bytes: The most that was seen.
    """

    def __init__(self) -> None:
        import psutil

        self.peak_bytes = 0
        self._process = psutil.Process()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tsdoc-memory", daemon=True)

    def _watch(self) -> None:
        while True:
            self._look()
            if self._over.wait(SAMPLE_EVERY_S):
                return

    def _look(self) -> None:
        info = self._process.memory_info()
        own = info.rss - getattr(info, "shared", 0)
        self.peak_bytes = max(self.peak_bytes, own)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
