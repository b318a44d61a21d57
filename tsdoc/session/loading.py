"""From a located model to a decoder in memory: threads, number types, free memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tsdoc.errors import ResourceError
from tsdoc.models.locate import LocatedModel
from tsdoc.models.weights import open_weights
from tsdoc.settings import EngineSettings

if TYPE_CHECKING:
    from tsdoc.engine.decoder import Decoder

MEMORY_MARGIN = 1 << 30  # left for activations and the rest of the machine


def resolve_compute_dtype(settings: EngineSettings, model: LocatedModel) -> str:
    """Returns "float32" or "bfloat16" for `compute_dtype`.

    auto is float32, the faster one on the CPUs measured, unless weights that lie on disk in a
    smaller type would not fit in memory once widened.
    """
    if settings.compute_dtype != "auto":
        return settings.compute_dtype
    import psutil

    weights = open_weights(model.directory)
    widened = sum(4 * t.numel() for t in weights.values() if t.dtype.itemsize < 4)
    fits = widened + MEMORY_MARGIN <= psutil.virtual_memory().total // 2
    return "float32" if fits else "bfloat16"


def load_decoder(model: LocatedModel, settings: EngineSettings, compute_dtype: str) -> Decoder:
    """Loads the weights; tensors stored in `compute_dtype` stay memory-mapped.

    Raises:
        ModelError: tensors are missing or misshapen.
        ResourceError: converting the weights needs more memory than is free.
    """
    import psutil
    import torch

    from tsdoc.engine.decoder import Decoder

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    dtype = torch.float32 if compute_dtype == "float32" else torch.bfloat16
    weights = open_weights(model.directory)
    needed = sum(t.numel() * dtype.itemsize for t in weights.values() if t.dtype != dtype)
    free = psutil.virtual_memory().available
    if needed + MEMORY_MARGIN > free:
        raise ResourceError(
            f"the weights need {needed / 1e9:.1f} GB of memory as {compute_dtype}, and "
            f"{free / 1e9:.1f} GB are free",
            where=model.name,
            hint="Choose a smaller model (`tsdoc models list`) or --set compute_dtype=bfloat16.",
        )
    return Decoder(model.config, weights, dtype)
