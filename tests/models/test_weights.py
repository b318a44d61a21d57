from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tsdoc.errors import ModelError
from tsdoc.models.safetensors_writer import SafetensorsWriter
from tsdoc.models.weights import open_weights, stored_sizes


def save_shards(directory: Path, weight_map: dict[str, Any] | None = None) -> None:
    save_file({"a": torch.ones(2, 3)}, directory / "model-00001-of-00002.safetensors")
    save_file({"b": torch.arange(4).bfloat16()}, directory / "model-00002-of-00002.safetensors")
    if weight_map is None:
        names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        weight_map = names
    index = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)


def test_shards_are_one_mapping_in_stored_dtypes(tmp_path: Path) -> None:
    save_shards(tmp_path)
    weights = open_weights(tmp_path)
    assert sorted(weights) == ["a", "b"]
    assert len(weights) == 2
    assert torch.equal(weights["a"], torch.ones(2, 3))
    assert weights["b"].dtype == torch.bfloat16


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        open_weights(tmp_path)


def test_a_cut_file_is_a_model_error(tmp_path: Path) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    for length in (0, 4, 20, len(data) - 1):
        (tmp_path / "model.safetensors").write_bytes(data[:length])
        with pytest.raises(ModelError, match="not a complete safetensors file"):
            open_weights(tmp_path)


@pytest.mark.parametrize(
    "weight_map", [{"a": "../secret.safetensors"}, {"a": "/etc/passwd"}, {"a": 5}, {}, "x"]
)
def test_an_index_cannot_reach_out_of_its_directory(tmp_path: Path, weight_map: Any) -> None:
    save_shards(tmp_path, weight_map)
    with pytest.raises(ModelError, match="the index names"):
        open_weights(tmp_path)


@pytest.mark.parametrize("text", ["{", "[" * 200_000])
def test_a_damaged_index_is_a_model_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match="cannot be read"):
        open_weights(tmp_path)


def test_writer_round_trip_in_slices(tmp_path: Path) -> None:
    values = {"x": torch.randn(5, 16), "y": torch.randn(16)}
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    with SafetensorsWriter(tmp_path / "model.safetensors", shapes) as writer:
        writer.write(values["x"][:2].numpy())
        writer.write(values["x"][2:].numpy())
        writer.write(values["y"].numpy())
        writer.finish()
    weights = open_weights(tmp_path)
    assert all(torch.equal(weights[name], value) for name, value in values.items())


def test_writer_notices_missing_numbers(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path / "model.safetensors", {"x": (4,)}) as writer:
        writer.write(torch.ones(3).numpy())
        with pytest.raises(ValueError, match="wrote"):
            writer.finish()


def test_sizes_are_known_without_torch(tmp_path: Path) -> None:
    save_shards(tmp_path)
    assert stored_sizes(tmp_path) == [(6, 32), (4, 16)]
    program = (
        "import sys; from pathlib import Path; from tsdoc.models.weights import stored_sizes;"
        f"stored_sizes(Path({str(tmp_path)!r})); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
