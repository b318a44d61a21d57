"""From a located model to a decoder on its device: threads, number types, free memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tsdoc.errors import ResourceError
from tsdoc.kernels.devices import Device
from tsdoc.models.locate import LocatedModel
from tsdoc.models.weights import open_weights
from tsdoc.settings import EngineSettings

if TYPE_CHECKING:
    import torch

    from tsdoc.engine.decoder import Decoder, DecoderPart
    from tsdoc.kernels.interface import Backend

MEMORY_MARGIN = 1 << 30  # left for activations and the rest of the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder and the device it runs on."""

    decoder: DecoderPart
    backend: Backend


def resolve_compute_dtype(settings: EngineSettings, model: LocatedModel, device: Device) -> str:
    """Returns "float32" or "bfloat16" for `compute_dtype`.

    auto is bfloat16 on a GPU. On a CPU it is float32, the faster one on those measured, unless
    weights that lie on disk in a smaller type would not fit in memory once widened.
    """
    if settings.compute_dtype != "auto":
        return settings.compute_dtype
    if device == "cuda":
        return "bfloat16"
    import psutil

    weights = open_weights(model.directory)
    widened = sum(4 * t.numel() for t in weights.values() if t.dtype.itemsize < 4)
    fits = widened + MEMORY_MARGIN <= psutil.virtual_memory().total // 2
    return "float32" if fits else "bfloat16"


def load_model(
    model: LocatedModel,
    settings: EngineSettings,
    compute_dtype: str,
    device: Device,
    *,
    keep: bool,
) -> LoadedModel:
    """Loads the weights.

    Args:
        model: Which model.
        settings: Threads and types.
        compute_dtype: "float32" or "bfloat16".
        device: Where it runs.
        keep: Whether K and V are kept in a store; without one, those on a GPU stay there.

    Raises:
        ModelError: tensors are missing or misshapen.
        ResourceError: the weights need more memory than is free.
    """
    if device == "cuda":
        return _load_on_cuda(model, settings, compute_dtype, keep=keep)
    from tsdoc.kernels.torch_cache import TorchBackend

    decoder = _load_decoder(model, settings, compute_dtype)
    return LoadedModel(
        decoder=decoder, backend=TorchBackend(num_kv_heads=model.config.num_kv_heads)
    )


def _load_on_cuda(
    model: LocatedModel, settings: EngineSettings, compute_dtype: str, *, keep: bool
) -> LoadedModel:
    import torch

    from tsdoc.engine.fused_decoder import FusedDecoder
    from tsdoc.kernels.triton_backend import TritonBackend, check_free

    dtype = _torch_dtype(compute_dtype)
    weights = open_weights(model.directory)
    check_free(sum(t.numel() for t in weights.values()) * dtype.itemsize, model.name)
    backend = TritonBackend(
        model.config,
        kv_dtype=settings.kv_dtype,
        compute_dtype=dtype,
        device=torch.device("cuda"),
        copy_back=keep,
    )
    decoder = FusedDecoder(model.config, weights, dtype, backend.device)
    return LoadedModel(decoder=decoder, backend=backend)


def _torch_dtype(compute_dtype: str) -> torch.dtype:
    import torch

    return torch.float32 if compute_dtype == "float32" else torch.bfloat16


def _load_decoder(model: LocatedModel, settings: EngineSettings, compute_dtype: str) -> Decoder:
    """On the CPU; tensors stored in `compute_dtype` stay memory-mapped."""
    import psutil
    import torch

    from tsdoc.engine.decoder import Decoder

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    dtype = _torch_dtype(compute_dtype)
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
