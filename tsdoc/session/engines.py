"""The engine of one session: weights that are loaded once, when somebody first needs them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tsdoc.kernels.devices import Device
from tsdoc.models.locate import LocatedModel
from tsdoc.session.loading import LoadedModel, build_engine, load_model
from tsdoc.session.resolving import index_config
from tsdoc.settings import Settings

if TYPE_CHECKING:
    from tsdoc.engine.engine import Engine


@dataclass(slots=True, kw_only=True)
class Engines:
    """Makes engines for prompts of any length.

    Attributes:
        compute_dtype: "float32" or "bfloat16".
        times_s: Takes the seconds that loading took, as `model_load`.
    """

    model: LocatedModel
    settings: Settings
    compute_dtype: str
    device: Device
    times_s: dict[str, float]
    _loaded: LoadedModel | None = field(default=None, init=False)
    _engine: Engine | None = field(default=None, init=False)

    def make(self, max_tokens: int) -> Engine:
        """Returns an engine for prompts of up to `max_tokens`.

        Raises:
            ModelError: tensors are missing or misshapen.
            ResourceError: the weights need more memory than is free.
            RankError: another rank ended.
            UsageError: the selection settings do not fit the model's window.
        """
        if self._loaded is None:
            begun = time.perf_counter()
            self._loaded = load_model(
                self.model,
                self.settings.engine,
                self.compute_dtype,
                self.device,
                self.settings.parallel,
            )
            self.times_s["model_load"] = time.perf_counter() - begun
        if self._engine is None or not self._engine.covers(max_tokens):
            self._engine = build_engine(
                self._loaded,
                self.settings.selection,
                max_tokens=max_tokens,
                question_chunk_size=self.settings.engine.question_chunk_size,
                index=index_config(self.settings.engine, self.device),
            )
        return self._engine

    def renew(self) -> None:
        """Nothing is under way: other ranks that were lost since start anew when needed."""
        if self._loaded is not None:
            self._loaded.team.followers.renew()

    def close(self) -> None:
        """Ends the other ranks, where there are any."""
        if self._loaded is not None:
            self._loaded.close()
