"""A rank's process: loads its shard of a model, prefills, answers, and says what it found."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.kernels.triton.interpreter import mend_interpreter
from tests.rank_processes import give, take_task
from tsdoc.engine.engine import Engine
from tsdoc.engine.evidence import look
from tsdoc.engine.generate import GenerationConfig
from tsdoc.engine.sharding import shard_model
from tsdoc.engine.team import Team
from tsdoc.kernels.devices import own_gpu
from tsdoc.kernels.kv import KVFile, KVPiece
from tsdoc.kernels.ranks import Mesh
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.sharded_cache import ShardedBackend
from tsdoc.kernels.shards import shard_groups
from tsdoc.kernels.shared_kv import FilePiece
from tsdoc.models.config import read_config
from tsdoc.models.weights import open_weights
from tsdoc.parallel.job import Job, Shard, make_on_device, make_shard


def answer(engine: Engine, pieces: list[KVPiece], task: dict[str, Any]) -> dict[str, Any]:
    """Prefills (or loads what is in the pieces), asks, answers greedily, looks where from."""
    ids, split = np.array(task["ids"], dtype=np.int32), task["split"]
    chunk = engine.runner.selection.chunk_size
    if task["computed"] < split:
        engine.prefill(
            pieces, ids[:split], task["computed"], prefill_block=4 * chunk,
            on_block=lambda end: None,
        )  # fmt: skip
    config = GenerationConfig(
        max_new_tokens=task["new"], stop_ids=frozenset(), question_chunk_size=chunk,
        theta=task["theta"], keep_queries=True,
    )  # fmt: skip
    generation = engine.generate(pieces, ids[split:].tolist(), split, config)
    tokens = list(generation)
    assert generation.log is not None
    document = (engine.runner.selection.n_init, split)
    seen = look(
        engine.runner, generation.cache, generation.log, document, question_chunk_size=chunk
    )
    at = len(ids)
    logits = engine.runner.run_chunks(
        generation.cache, torch.tensor([7, 8, 9]), at, [(at, at + 3)], need_logits=True
    )
    assert logits is not None
    return {
        "tokens": tokens,
        "lookups": generation.reuse.num_lookups,
        "hits": generation.reuse.num_hits,
        "logits": logits.tolist(),
        "votes": seen.votes.tolist(),
        "attention": seen.attention.tolist(),
    }


def load(task: dict[str, Any], mesh: Mesh) -> Shard:
    directory = Path(task["directory"])
    config, weights = read_config(directory), open_weights(directory)
    job = Job(
        directory=str(directory), tensor=mesh.tensor.size, sequence=mesh.sequence.size,
        device="cuda" if task["kernels"] == "triton" else "cpu", compute_dtype="float32",
        kv_dtype="float32", device_memory=None, threads=1,
    )  # fmt: skip
    if task["kernels"] == "triton":
        device = own_gpu() if task["device"] == "cuda" else torch.device("cpu")
        own = shard_model(config, mesh.tensor, shard_groups)
        return make_on_device(job, mesh, own, weights, torch.float32, device)
    made = make_shard(job, mesh, config, weights)
    # Stretches as short as the tests' prompts.
    heads = shard_model(config, mesh.tensor).heads
    return dataclasses.replace(made, backend=ShardedBackend(heads, mesh, share_tokens=16))


def main() -> None:
    task, mesh = take_task()
    if task["kernels"] == "triton" and task["device"] == "cpu":
        mend_interpreter()
    shard = load(task, mesh)
    selection = SelectionConfig(**task["selection"])
    engine = Engine(
        shard.decoder, selection, max_tokens=4096, question_chunk_size=selection.chunk_size,
        backend=shard.backend, team=Team(mesh=mesh),
    )  # fmt: skip
    pieces: list[KVPiece] = [FilePiece(KVFile(**file)) for file in task["files"]]
    give(answer(engine, pieces, task))


if __name__ == "__main__":
    main()
