"""What a follower is started with: which model, which part of it, which device."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tsdoc.errors import UsageError
from tsdoc.kernels.devices import count_gpus, own_gpu
from tsdoc.models.config import ModelConfig, read_config
from tsdoc.models.weights import open_weights
from tsdoc.settings import ParallelSettings, SelectionSettings

if TYPE_CHECKING:
    import torch

    from tsdoc.engine.decoder import DecoderPart
    from tsdoc.engine.sharding import ModelShard
    from tsdoc.kernels.interface import Backend
    from tsdoc.kernels.ranks import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One model on several ranks.

    Attributes:
        directory: Of the model.
        tensor: Ranks that share the weights and the heads.
        sequence: Ranks that share the tokens.
        device: "cpu" or "cuda".
        compute_dtype: "float32" or "bfloat16".
        kv_dtype: "float32" or "bfloat16".
        device_memory: Bytes of each GPU to use at most; None is all there is.
        threads: CPU threads of each rank.
        spread: The ranks are on several machines, which share no memory.
    """

    directory: str
    tensor: int
    sequence: int
    device: str
    compute_dtype: str
    kv_dtype: str
    device_memory: int | None
    threads: int
    spread: bool = False

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tensor * self.sequence

    def to_json(self) -> str:
        """Returns the job as one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Job:
        """Returns the job that `to_json` wrote."""
        return Job(**json.loads(line))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """What a rank computes with."""

    config: ModelConfig
    decoder: DecoderPart
    backend: Backend


def load_shard(job: Job, mesh: Mesh, check: Callable[[], None] | None = None) -> Shard:
    """Loads this rank's part of the model.

    Args:
        job: Which model, and how it is shared.
        mesh: All ranks.
        check: Called before each tensor is read; what it raises ends the loading.

    Raises:
        ModelError: tensors are missing or misshapen.
        UsageError: there are more ranks than query heads.
    """
    directory = Path(job.directory)
    weights = open_weights(directory)
    if check is not None:
        weights = _Checked(weights, check)
    return make_shard(job, mesh, read_config(directory), weights)


class _Checked(Mapping[str, "torch.Tensor"]):
    """Weights; `check` is called before each tensor is read."""

    def __init__(self, weights: Mapping[str, torch.Tensor], check: Callable[[], None]) -> None:
        self._weights = weights
        self._check = check

    def __getitem__(self, name: str) -> torch.Tensor:
        self._check()
        return self._weights[name]

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def make_shard(
    job: Job, mesh: Mesh, config: ModelConfig, weights: Mapping[str, torch.Tensor]
) -> Shard:
    """Cuts this rank's part out of `weights`; see `load_shard`."""
    import torch

    from tsdoc.engine.sharding import shard_model
    from tsdoc.kernels.shards import shard_groups

    torch.set_num_threads(job.threads)
    dtype = torch.float32 if job.compute_dtype == "float32" else torch.bfloat16
    if job.device == "cuda":
        shard = shard_model(config, mesh.tensor, shard_groups)
        return make_on_device(job, mesh, shard, weights, dtype, own_gpu())
    shard = shard_model(config, mesh.tensor)
    from tsdoc.engine.decoder import Decoder
    from tsdoc.kernels.sharded_cache import ShardedBackend
    from tsdoc.kernels.spread_cache import SpreadBackend
    from tsdoc.kernels.workers import Workers

    workers = Workers()
    decoder = Decoder(shard.config, shard.weights(weights), dtype, shard.split, workers=workers)
    backend: Backend = (
        SpreadBackend(
            shard.heads,
            mesh,
            num_layers=config.num_layers,
            head_dim=config.head_dim,
            kv_dtype=job.kv_dtype,
            workers=workers,
        )
        if job.spread
        else ShardedBackend(shard.heads, mesh, workers)
    )
    return Shard(config=config, decoder=decoder, backend=backend)


def make_on_device(
    job: Job,
    mesh: Mesh,
    shard: ModelShard,
    weights: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Shard:
    """Cuts this rank's part for Triton's kernels.

    Args:
        job: Types and memory.
        mesh: All ranks.
        shard: This rank's heads, as `shard_groups` splits them.
        weights: Of the whole model, read tensor by tensor.
        dtype: Type of weights and arithmetic.
        device: This rank's GPU; the CPU where kernels run in Triton's interpreter.
    """
    from tsdoc.engine.fused_decoder import FusedDecoder
    from tsdoc.kernels.sharded_triton import ShardedTritonBackend
    from tsdoc.kernels.triton_backend import TritonBackend

    inner = TritonBackend(
        shard.config,
        kv_dtype=job.kv_dtype,
        compute_dtype=dtype,
        device=device,
        memory_bytes=job.device_memory,
        ranks=mesh.tensor,
    )
    decoder = FusedDecoder(shard.config, shard.weights(weights), dtype, inner.device, shard.split)
    backend = ShardedTritonBackend(inner, shard.heads, mesh)
    return Shard(config=shard.whole, decoder=decoder, backend=backend)


def check_parallel(
    parallel: ParallelSettings, config: ModelConfig, selection: SelectionSettings, device: str
) -> None:
    """Refuses what cannot be done, before anything is computed.

    Raises:
        UsageError: there are more ranks than heads, or a device, axis or platform without support.
    """
    if parallel.size == 1:
        return
    if parallel.tensor > config.num_qo_heads:
        raise UsageError(
            f"{config.num_qo_heads} query heads cannot be split over {parallel.tensor} processes",
            hint="Lower --parallel.",
        )
    if not sys.platform.startswith("linux"):
        raise UsageError("several processes are supported on Linux alone")
    if device == "cuda":
        if parallel.launcher == "torchrun":
            raise UsageError(
                "several machines are supported on their CPUs alone", hint="Add --device cpu."
            )
        _check_cuda(parallel, config, selection)


def _check_cuda(
    parallel: ParallelSettings, config: ModelConfig, selection: SelectionSettings
) -> None:
    """On GPUs the heads are shared out, whole groups of them or equal parts of one."""
    from tsdoc.kernels.shards import shard_groups

    if parallel.sequence > 1:
        raise UsageError(
            "parallel.sequence is supported on the CPU alone",
            hint="Use --parallel, which spreads K and V over the GPUs too, or --device cpu.",
        )
    try:
        shard = shard_groups(config.num_qo_heads, config.num_kv_heads, 0, parallel.tensor)
    except ValueError as error:
        raise UsageError(
            str(error).replace("ranks", "GPUs"),
            hint="Choose another --parallel, or --device cpu.",
        ) from error
    if selection.function == "head_vote":
        raise UsageError("head_vote runs on one GPU, or with --device cpu")
    if selection.sets == "per_kv_head" and shard.replicates:
        raise UsageError(
            "a selection per KV head needs all query heads of one on the same GPU",
            hint=f"Use --parallel {config.num_kv_heads} at most, or --device cpu.",
        )
    found = count_gpus()
    if found < parallel.size:
        raise UsageError(
            f"--parallel {parallel.size} needs as many GPUs, and there are {found}",
            hint="Lower --parallel, or add --device cpu.",
        )
