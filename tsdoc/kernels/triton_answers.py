"""Answers on one device, one after the other, in the same decode steps where these fit."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tsdoc.kernels.triton_decode import DecodeSetup, DecodeSteps


class TritonDecode:
    """See `DeviceDecode`: one answer's use of `steps`."""

    def __init__(self, steps: DecodeSteps) -> None:
        self._steps: DecodeSteps | None = steps
        self._counts = (0, 0)

    @property
    def position(self) -> torch.Tensor:
        """See `DeviceDecode.position`."""
        return self._current().position

    @property
    def num_lookups(self) -> int:
        """See `DeviceDecode.num_lookups`."""
        return self._now()[0]

    @property
    def num_hits(self) -> int:
        """See `DeviceDecode.num_hits`."""
        return self._now()[1]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `DeviceDecode.attend`."""
        return self._current().attend(layer, q, k, v)

    def run(self, step: Callable[[torch.Tensor], torch.Tensor], token: int) -> torch.Tensor:
        """See `DeviceDecode.run`."""
        return self._current().run(step, token)

    def end(self) -> None:
        """Makes way for the next answer; the counts stay."""
        self._counts, self._steps = self._now(), None

    def _now(self) -> tuple[int, int]:
        return self._counts if self._steps is None else self._steps.counts()

    def _current(self) -> DecodeSteps:
        if self._steps is None:
            raise RuntimeError("a later answer has begun on this device")
        return self._steps


class DecodeStarter:
    """Starts answers, each with the last one's buffers where they fit."""

    def __init__(self) -> None:
        self._last: tuple[DecodeSteps, TritonDecode] | None = None

    def start(
        self, setup: DecodeSetup, position: int, allowed: torch.Tensor | None
    ) -> TritonDecode:
        """Ends the last answer and starts one at `position`."""
        steps = None
        if self._last is not None:
            steps, decode = self._last
            decode.end()
            self._last = None
        if steps is None or not steps.setup.equals(setup):
            steps = None  # frees the old buffers first
            steps = DecodeSteps(setup)
        steps.begin(position, allowed)
        decode = TritonDecode(steps)
        self._last = (steps, decode)
        return decode
