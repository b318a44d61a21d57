from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.models import synthetic
from tsdoc.errors import ModelError
from tsdoc.models.gguf_header import read_gguf_header


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path, _ = synthetic.write_model_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf")
    return path.read_bytes()


def refusal(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        read_gguf_header(path)
    assert caught.value.where == str(path)
    return caught.value.message


def test_metadata_and_tensors_are_read(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    header = read_gguf_header(path)
    assert header.metadata["general.architecture"] == "qwen2"
    assert header.metadata["qwen2.attention.layer_norm_rms_epsilon"] == 1e-6
    assert header.metadata["tokenizer.ggml.tokens"] == synthetic.byte_vocabulary()[0]
    tensor = header.tensors["blk.0.ffn_up.weight"]
    assert (tensor.shape, tensor.type_name, tensor.num_bytes) == ((96, 64), "F32", 96 * 64 * 4)


@pytest.mark.parametrize("data", [b"", b"GGU", b"PK\x03\x04" + bytes(100)])
def test_another_kind_of_file_is_refused(tmp_path: Path, data: bytes) -> None:
    assert "not a complete GGUF file" in refusal(tmp_path, data)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, whole: bytes) -> None:
    for length in [4, 8, 20, 24, 30, 1000, len(whole) // 2, len(whole) - 64]:
        assert "not a complete GGUF file" in refusal(tmp_path, whole[:length])


@pytest.mark.parametrize("position", [8, 16])
def test_absurd_counts_are_refused(tmp_path: Path, whole: bytes, position: int) -> None:
    data = whole[:position] + struct.pack("<Q", 1 << 62) + whole[position + 8 :]
    assert "impossible counts" in refusal(tmp_path, data)


def test_absurd_string_length_is_refused(tmp_path: Path, whole: bytes) -> None:
    data = whole[:24] + struct.pack("<Q", 1 << 60) + whole[32:]
    assert "string" in refusal(tmp_path, data)


def test_absurd_array_length_is_refused(tmp_path: Path, whole: bytes) -> None:
    key = b"tokenizer.ggml.merges" + struct.pack("<II", 9, 8)
    at = whole.index(key) + len(key)
    data = whole[:at] + struct.pack("<Q", 1 << 60) + whole[at + 8 :]
    assert "array" in refusal(tmp_path, data)


def test_unknown_version_and_storage_type_are_named(tmp_path: Path, whole: bytes) -> None:
    assert "version 9" in refusal(tmp_path, b"GGUF" + struct.pack("<I", 9) + whole[8:])
    name = b"blk.0.ffn_up.weight" + struct.pack("<IQQ", 2, 64, 96)
    at = whole.index(name) + len(name)
    data = whole[:at] + struct.pack("<I", 999) + whole[at + 4 :]
    assert "storage type 999" in refusal(tmp_path, data)


def test_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read_gguf_header(tmp_path / "none.gguf")
