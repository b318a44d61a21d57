"""Ranks whose kernels are Triton's, as threads, equal one engine on the CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.kernels.triton.test_engine import FEW_LAYERS, SMALL, answer
from tests.thread_ranks import run_ranks
from tests.tiny_models import make_config, make_engine, make_oracle, memory_piece, token_ids
from tsdoc.engine.engine import Engine
from tsdoc.engine.evidence import look
from tsdoc.engine.sharding import shard_model
from tsdoc.engine.team import Team
from tsdoc.kernels.ranks import Mesh
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.shards import shard_groups
from tsdoc.parallel.job import Job, make_on_device

NUM_TOKENS, SPLIT, NEW = 58, 48, 4


def device_engine(
    oracle: transformers.PreTrainedModel, config: SelectionConfig, mesh: Mesh
) -> Engine:
    job = Job(
        directory="",
        tensor=mesh.tensor.size,
        sequence=1,
        device="cuda",
        compute_dtype="float32",
        kv_dtype="float32",
        device_memory=None,
        threads=1,
    )
    shard = shard_model(make_config(oracle), mesh.tensor, shard_groups)
    device = torch.device("cpu")  # in the interpreter
    made = make_on_device(job, mesh, shard, oracle.state_dict(), torch.float32, device)
    return Engine(
        made.decoder,
        config,
        max_tokens=4096,
        question_chunk_size=16,
        backend=made.backend,
        team=Team(mesh=mesh),
    )


def compare(config: SelectionConfig, ranks: int, theta: float | None, **shape: Any) -> None:
    oracle = make_oracle("qwen2", seed=21, **FEW_LAYERS, **shape)
    ids = token_ids(NUM_TOKENS, seed=22)
    single = make_engine(oracle, config)
    expected, expected_keys = answer(single, ids, SPLIT, theta, NEW)
    assert expected.log is not None
    looked = look(expected.runner, expected.cache, expected.log, (6, 44), question_chunk_size=16)
    piece = memory_piece(single, NUM_TOKENS + NEW)

    def work(mesh: Mesh) -> tuple[object, ...]:
        found, keys = answer(device_engine(oracle, config, mesh), ids, SPLIT, theta, NEW, piece)
        assert found.log is not None
        seen = look(found.runner, found.cache, found.log, (6, 44), question_chunk_size=16)
        counts = (found.reuse.num_lookups, found.reuse.num_hits)
        return found.tokens, counts, keys, seen.votes, seen.attention

    for tokens, counts, keys, votes, attention in run_ranks(ranks, 1, work):
        assert tokens == expected.tokens
        assert counts == (expected.reuse.num_lookups, expected.reuse.num_hits)
        np.testing.assert_allclose(keys, expected_keys, atol=1e-3)
        torch.testing.assert_close(votes, looked.votes, atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(attention, looked.attention, atol=1e-4, rtol=1e-3)


@pytest.fixture(autouse=True)
def interpreted() -> None:
    from tests.kernels.triton.conftest import check_mode

    check_mode("interpreter")


def test_two_ranks_decide_together_in_prefill_and_decode() -> None:
    compare(SMALL, 2, 0.5)


@pytest.mark.slow
def test_ranks_that_share_a_kv_head_each_hold_it() -> None:
    compare(SMALL, 4, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"sets": "per_kv_head"}, {"function": "topk"}, {"smoothing": 5}],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_every_policy_that_gpus_share(changes: dict[str, object]) -> None:
    compare(dataclasses.replace(SMALL, **changes), 2, None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_groups_are_shared_out_unevenly() -> None:
    compare(SMALL, 2, 0.5, num_attention_heads=9, num_key_value_heads=3)
