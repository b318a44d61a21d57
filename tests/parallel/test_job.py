"""Which splits are refused before anything is computed."""

from __future__ import annotations

import dataclasses

import pytest

from tests.tiny_models import make_config, make_oracle
from tsdoc.errors import UsageError
from tsdoc.models.config import ModelConfig
from tsdoc.parallel import job
from tsdoc.parallel.job import check_parallel
from tsdoc.settings import ParallelSettings, SelectionSettings


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return dataclasses.replace(make_config(make_oracle("qwen2")), num_qo_heads=28, num_kv_heads=4)


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "count_gpus", lambda: 8)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_gpus_take_whole_groups_or_equal_parts_of_one(ranks: int, config: ModelConfig) -> None:
    check_parallel(ParallelSettings(tensor=ranks), config, SelectionSettings(), "cuda")


@pytest.mark.parametrize(
    ("parallel", "selection", "message"),
    [
        ({"tensor": 5}, {}, "4 KV heads cannot be split evenly over 5 GPUs"),
        ({"tensor": 2, "sequence": 2}, {}, "parallel.sequence is supported on the CPU alone"),
        ({"tensor": 2}, {"function": "head_vote"}, "head_vote runs on one GPU"),
        ({"tensor": 8}, {"sets": "per_kv_head"}, "all query heads of one on the same GPU"),
        ({"tensor": 12}, {}, "--parallel 12 needs as many GPUs, and there are 8"),
        ({"tensor": 29}, {}, "28 query heads cannot be split over 29 processes"),
    ],
)
def test_what_gpus_cannot_do_is_refused(
    parallel: dict[str, int], selection: dict[str, str], message: str, config: ModelConfig
) -> None:
    settings = SelectionSettings.model_validate(selection)
    with pytest.raises(UsageError, match=message):
        check_parallel(ParallelSettings.model_validate(parallel), config, settings, "cuda")


def test_one_gpu_is_never_refused(config: ModelConfig) -> None:
    settings = SelectionSettings.model_validate({"function": "head_vote"})
    check_parallel(ParallelSettings(), config, settings, "cuda")


def test_cpus_split_heads_in_any_way(config: ModelConfig) -> None:
    check_parallel(ParallelSettings(tensor=5, sequence=2), config, SelectionSettings(), "cpu")
