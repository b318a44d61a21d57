"""Ranks in processes of their own, over gloo or NCCL, equal one: prefill, answer, evidence.

K and V lie in memory that all processes share, so what one number of ranks has written is read by
another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.rank_answer import answer
from tests.engine.test_ranks import QWEN2_72B
from tests.engine.test_small_budget import SMALL, VARIANTS
from tests.rank_processes import run_processes
from tests.tiny_models import make_oracle, token_ids
from tsdoc.engine.decoder import Decoder
from tsdoc.engine.engine import Engine
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.shared_kv import SharedPiece
from tsdoc.models.config import ModelConfig, read_config
from tsdoc.models.locate import LocatedModel
from tsdoc.models.weights import open_weights
from tsdoc.prompt.tokenizer import TextTokenizer

SPLIT, QUESTION, NEW = 150, 12, 8
WORKER = "tests.engine.rank_answer"
HEADS = {"6/2": (6, 2), "9/3": (9, 3), "14/2": (14, 2)}


def save_model(directory: Path, seed: int, **shape: Any) -> Path:
    make_oracle("qwen2", seed=seed, **shape).save_pretrained(directory)
    return directory


def make_task(directory: Path, **changes: Any) -> dict[str, Any]:
    return {
        "directory": str(directory),
        "device": "cpu",
        "kernels": "torch",
        "selection": asdict(SMALL),
        "ids": token_ids(SPLIT + QUESTION, seed=4).tolist(),
        "split": SPLIT,
        "computed": 0,
        "new": NEW,
        "theta": 0.9,
        **changes,
    }


def make_pieces(config: ModelConfig, task: dict[str, Any]) -> list[SharedPiece]:
    """Room for the prompt, and for question and answer."""
    split, end = task["split"], len(task["ids"]) + task["new"] + 8
    return [
        SharedPiece(
            start=start,
            capacity=stop - start,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            kv_dtype="float32",
        )
        for start, stop in ((0, split), (split, end))
    ]


def alone(task: dict[str, Any], pieces: list[SharedPiece]) -> dict[str, Any]:
    """What one rank, this process, says."""
    directory, selection = Path(task["directory"]), SelectionConfig(**task["selection"])
    decoder = Decoder(read_config(directory), open_weights(directory), torch.float32)
    engine = Engine(decoder, selection, max_tokens=4096, question_chunk_size=selection.chunk_size)
    return answer(engine, [*pieces], task)


def together(
    task: dict[str, Any], pieces: list[SharedPiece], tensor: int, sequence: int
) -> list[dict[str, Any]]:
    files = [asdict(piece.file) for piece in pieces]
    return run_processes(WORKER, {**task, "files": files}, tensor, sequence)


def check(found: list[dict[str, Any]], expected: dict[str, Any], *, same: bool = True) -> None:
    for one in found:
        assert one["tokens"] == expected["tokens"]
        assert one["hits"] == expected["hits"]
        assert one["lookups"] == expected["lookups"]
        for name, rtol, atol in (
            ("logits", 0, 1e-3), ("votes", 1e-3, 1e-5), ("attention", 1e-3, 1e-5),
        ):  # fmt: skip
            np.testing.assert_allclose(one[name], expected[name], rtol=rtol, atol=atol)
        assert one["tokens"] == found[0]["tokens"]
        if same:  # what all decide alike, they compute from the same bits
            assert one["logits"] == found[0]["logits"]


def compare(task: dict[str, Any], tensor: int, sequence: int = 1) -> None:
    config = read_config(Path(task["directory"]))
    own, shared = make_pieces(config, task), make_pieces(config, task)
    expected = alone(task, own)
    check(together(task, shared, tensor, sequence), expected)
    for layer in range(config.num_layers):
        for one, other in zip(own, shared, strict=True):
            np.testing.assert_allclose(other.keys(layer), one.keys(layer), atol=1e-3)
            np.testing.assert_allclose(other.values(layer), one.values(layer), atol=1e-3)


@pytest.mark.slow
def test_four_processes_split_a_model_of_the_72b_shape(tmp_path: Path) -> None:
    compare(make_task(save_model(tmp_path, 9, **QWEN2_72B)), 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "sequence"), [(2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2), (4, 2)]
)
@pytest.mark.parametrize("heads", HEADS)
def test_processes_equal_one(heads: str, tensor: int, sequence: int, tmp_path: Path) -> None:
    queries, keys = HEADS[heads]
    shape = {"num_attention_heads": queries, "num_key_value_heads": keys}
    compare(make_task(save_model(tmp_path, 5, **shape)), tensor, sequence)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["per_kv_head", "head_vote", "topk", "smoothing"])
def test_every_policy(name: str, tmp_path: Path) -> None:
    compare(make_task(save_model(tmp_path, 3), selection=asdict(VARIANTS[name])), 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrote", "reads"),
    [((2, 1), (1, 1)), ((2, 1), (4, 1)), ((1, 1), (3, 1)), ((1, 2), (2, 2)), ((2, 2), (1, 3))],
)
def test_what_any_number_wrote_is_read_by_any_other(
    wrote: tuple[int, int], reads: tuple[int, int], tmp_path: Path
) -> None:
    task = make_task(save_model(tmp_path, 5, num_attention_heads=14, num_key_value_heads=2))
    pieces = make_pieces(read_config(tmp_path), task)
    (expected, *_) = together(task, pieces, *wrote)
    kept = pieces[0].keys(2).copy()
    found = together({**task, "computed": SPLIT}, pieces, *reads)
    check(found, expected)
    np.testing.assert_array_equal(pieces[0].keys(2), kept)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "sequence"), [(2, 1), (3, 1), (4, 1), (1, 2), (2, 2)])
def test_the_tiny_model(
    tensor: int, sequence: int, packaged_model: Callable[[str], LocatedModel]
) -> None:
    model = packaged_model("tiny")
    text = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")
    ids = TextTokenizer(model.directory).encode(text)[0][:700]
    selection = SelectionConfig(n_init=16, n_local=64, top_k=128, chunk_size=64)
    task = make_task(
        model.directory, ids=[int(i) for i in ids], split=640, selection=asdict(selection)
    )
    compare(task, tensor, sequence)


@pytest.mark.slow
def test_kernels_of_several_processes_equal_the_cpu(tmp_path: Path) -> None:
    task = make_task(save_model(tmp_path, 21), split=64, ids=token_ids(74, seed=22).tolist(), new=4)
    pieces = make_pieces(read_config(tmp_path), task)
    expected = alone(task, make_pieces(read_config(tmp_path), task))
    check(together({**task, "kernels": "triton"}, pieces, 2, 1), expected)


@pytest.mark.multigpu
@pytest.mark.parametrize("name", ["paper", "per_kv_head", "topk", "smoothing"])
def test_two_gpus_equal_one_and_the_cpu(name: str, tmp_path: Path) -> None:
    task = make_task(
        save_model(tmp_path, 23), selection=asdict(VARIANTS[name]), split=300, new=12,
        ids=token_ids(312, seed=24).tolist(), theta=None if name == "topk" else 0.5,
    )  # fmt: skip
    config = read_config(tmp_path)
    expected = alone(task, make_pieces(config, task))
    on_gpu = {**task, "kernels": "triton", "device": "cuda"}
    pieces = make_pieces(config, task)
    for wrote in (1, 2):
        pieces = make_pieces(config, task)
        check(together(on_gpu, pieces, wrote, 1), expected)
    # What two GPUs wrote is read by one.
    check(together({**on_gpu, "computed": task["split"]}, pieces, 1, 1), expected)
