"""What is to be profiled."""

from __future__ import annotations

from dataclasses import dataclass

from tsdoc.ingest.options import IngestOptions
from tsdoc.profile.results import SweepOption


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """The arguments of `tsdoc profile`.

    Attributes:
        sources: What is read; empty for made text or random ids.
        ingest: How it is read.
        num_tokens: Length of the prompt; None is that of the sources.
        random_weights: Whether only the shape of the model is used.
        compare_full: Whether full attention is measured beside it.
        sweeps: Options whose values are tried.
        offline: Forbids downloads.
        command: The command line, for the report.
        start_up_s: From the start of the process to this request.
    """

    sources: tuple[str, ...]
    ingest: IngestOptions
    num_tokens: int | None
    random_weights: bool
    compare_full: bool
    sweeps: tuple[SweepOption, ...]
    offline: bool
    command: str
    start_up_s: float
