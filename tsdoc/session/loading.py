"""From a located model to a decoder on its device: threads, number types, free memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tsdoc.errors import ResourceError
from tsdoc.kernels.devices import Device
from tsdoc.kernels.index_use import IndexConfig
from tsdoc.models.config import ModelConfig
from tsdoc.models.locate import LocatedModel
from tsdoc.models.weights import open_weights
from tsdoc.page_tables import populate
from tsdoc.progress import Reporter
from tsdoc.session.calibration import num_cpus
from tsdoc.session.resolving import MEMORY_MARGIN, narrows_weights
from tsdoc.settings import EngineSettings, ParallelSettings, SelectionSettings
from tsdoc.terminal import format_count

if TYPE_CHECKING:
    import torch

    from tsdoc.engine.decoder import DecoderPart
    from tsdoc.engine.engine import Engine
    from tsdoc.engine.team import Team
    from tsdoc.kernels.interface import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A decoder and the device it runs on.

    Attributes:
        team: The ranks that share the model.
        steps: The decoder for generated tokens; None is `decoder`.
    """

    decoder: DecoderPart
    backend: Backend
    team: Team
    steps: DecoderPart | None = None

    def close(self) -> None:
        """Ends the other ranks."""
        self.team.followers.close()


def warn_of_few_cores(parallel: ParallelSettings, device: Device, reporter: Reporter) -> None:
    """Warns where several ranks would have to share a core of the CPU."""
    cores = num_cpus()
    if device == "cpu" and parallel.launcher == "tsdoc" and parallel.size > cores:
        reporter.warn(
            "few_cores",
            "--parallel",
            f"{parallel.size} processes share {format_count(cores, 'core')} and take turns; "
            f"at most {cores} are of use",
        )


def load_model(
    model: LocatedModel,
    settings: EngineSettings,
    compute_dtype: str,
    device: Device,
    parallel: ParallelSettings,
) -> LoadedModel:
    """Loads the weights; with several ranks, starts the others, which load theirs.

    Args:
        model: Which model.
        settings: Threads and types.
        compute_dtype: "float32" or "bfloat16".
        device: Where it runs.
        parallel: How many ranks share it.

    Raises:
        ModelError: tensors are missing or misshapen.
        ResourceError: the weights need more memory than is free.
        RankError: another rank ended.
        UsageError: the model cannot be split like that.
    """
    weights, dtype = open_weights(model.directory), _torch_dtype(compute_dtype)
    # On the CPU, tensors stored in `compute_dtype` stay memory-mapped.
    copied = sum(t.numel() for t in weights.values() if device == "cuda" or t.dtype != dtype)
    devices = parallel.tensor if device == "cuda" else 1
    _check_memory(
        copied * dtype.itemsize // devices,
        compute_dtype,
        device,
        model.name,
        settings.device_memory,
    )
    if parallel.size > 1:
        return _load_on_ranks(model, settings, compute_dtype, device, parallel)
    if copied:
        _read_ahead([(t.data_ptr(), t.nbytes) for t in weights.values()])
    return _load(model.config, weights, settings, dtype, device)


def _load_on_ranks(
    model: LocatedModel,
    settings: EngineSettings,
    compute_dtype: str,
    device: Device,
    parallel: ParallelSettings,
) -> LoadedModel:
    from tsdoc.engine.team import Team
    from tsdoc.parallel.job import Job
    from tsdoc.parallel.leader import Leader

    job = Job(
        directory=str(model.directory),
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        device=device,
        compute_dtype=compute_dtype,
        kv_dtype=settings.kv_dtype,
        device_memory=settings.device_memory,
        threads=settings.threads or max(1, num_cpus() // parallel.size),
        spread=parallel.launcher == "torchrun",
    )
    leader = Leader(job)
    try:
        shard = leader.load()
    except BaseException:
        leader.close()
        raise
    team = Team(mesh=leader.mesh, followers=leader)
    return LoadedModel(decoder=shard.decoder, backend=shard.backend, team=team)


def load_random(
    config: ModelConfig, settings: EngineSettings, compute_dtype: str, device: Device, *, name: str
) -> LoadedModel:
    """Makes random weights of the shape `config`: enough to measure time, and no model is needed.

    Raises:
        ResourceError: they need more memory than is free.
    """
    from tsdoc.engine.random_weights import RandomWeights, tensor_shapes

    dtype = _torch_dtype(compute_dtype)
    count = sum(math.prod(shape) for shape in tensor_shapes(config).values())
    _check_memory(count * dtype.itemsize, compute_dtype, device, name, settings.device_memory)
    weights = RandomWeights(config, dtype, device)
    return _load(config, weights, settings, dtype, device)


def _load(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    settings: EngineSettings,
    dtype: torch.dtype,
    device: Device,
) -> LoadedModel:
    if device == "cuda":
        return _load_on_cuda(config, weights, settings, dtype)
    import torch

    from tsdoc.engine.decoder import Decoder
    from tsdoc.engine.team import ALONE
    from tsdoc.kernels.torch_cache import TorchBackend
    from tsdoc.kernels.workers import Workers

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    workers = Workers()
    decoder = Decoder(config, weights, dtype, workers=workers)
    _read_ahead(decoder.places)
    return LoadedModel(
        decoder=decoder,
        backend=TorchBackend(num_kv_heads=config.num_kv_heads, dtype=dtype, workers=workers),
        team=ALONE,
        steps=decoder.narrowed() if narrows_weights(settings, config, dtype) else None,
    )


def _read_ahead(places: list[tuple[int, int]]) -> None:
    """Begins to fill the page tables of mapped weights: address and bytes of each tensor."""
    import psutil

    if sum(size for _, size in places) + MEMORY_MARGIN <= psutil.virtual_memory().available:
        args = (places,)
        threading.Thread(target=populate, args=args, name="tsdoc-weights", daemon=True).start()


def build_engine(
    loaded: LoadedModel,
    selection: SelectionSettings,
    *,
    max_tokens: int,
    question_chunk_size: int,
    index: IndexConfig | None = None,
) -> Engine:
    """Returns an engine for prompts, with question and answer, of up to `max_tokens`.

    Raises:
        UsageError: the selection settings do not fit the model's window.
    """
    from tsdoc.engine.engine import Engine
    from tsdoc.kernels.selection import SelectionConfig

    return Engine(
        loaded.decoder,
        SelectionConfig(**selection.model_dump()),
        max_tokens=max_tokens,
        question_chunk_size=question_chunk_size,
        backend=loaded.backend,
        index=index,
        team=loaded.team,
        steps=loaded.steps,
    )


def _load_on_cuda(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    settings: EngineSettings,
    dtype: torch.dtype,
) -> LoadedModel:
    import torch

    from tsdoc.engine.fused_decoder import FusedDecoder
    from tsdoc.engine.team import ALONE
    from tsdoc.kernels.triton_backend import TritonBackend

    backend = TritonBackend(
        config,
        kv_dtype=settings.kv_dtype,
        compute_dtype=dtype,
        device=torch.device("cuda"),
        memory_bytes=settings.device_memory,
    )
    return LoadedModel(
        decoder=FusedDecoder(config, weights, dtype, backend.device),
        backend=backend,
        team=ALONE,
    )


def _torch_dtype(compute_dtype: str) -> torch.dtype:
    import torch

    return torch.float32 if compute_dtype == "float32" else torch.bfloat16


def _check_memory(
    num_bytes: int, compute_dtype: str, device: Device, name: str, limit: int | None
) -> None:
    if device == "cuda":
        from tsdoc.kernels.triton_backend import check_free

        check_free(num_bytes, name, limit)
        return
    import psutil

    free = psutil.virtual_memory().available
    if num_bytes + MEMORY_MARGIN > free:
        raise ResourceError(
            f"the weights need {num_bytes / 1e9:.1f} GB of memory as {compute_dtype}, and "
            f"{free / 1e9:.1f} GB are free",
            where=name,
            hint="Choose a smaller model (`tsdoc models list`) or --set compute_dtype=bfloat16.",
        )
