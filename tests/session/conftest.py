from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.prompt.vocabularies import make_byte_level
from tests.tiny_models import make_oracle
from tsdoc.home import Home
from tsdoc.ingest.options import IngestOptions
from tsdoc.session import Session, open_session
from tsdoc.settings import Settings

TEXT = "".join(f"Fact {i}: the locker {i} holds item {i * 37 % 101}.\n" for i in range(120))


@dataclass
class Recorder:
    """A reporter that remembers; `interrupt_at` stops a prefill like Ctrl-C."""

    notes: list[str] = field(default_factory=list)
    warnings: list[tuple[str, str, str]] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    interrupt_at: int | None = None

    def start(self, stage: str, total: int | None, unit: str) -> None:
        self.stages.append(stage)

    def advance(self, done: int) -> None:
        stop = self.interrupt_at is not None and done >= self.interrupt_at
        if self.stages[-1] == "prefill" and stop:
            raise KeyboardInterrupt

    def working(self, units: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def note(self, message: str) -> None:
        self.notes.append(message)

    def warn(self, code: str, where: str, message: str) -> None:
        self.warnings.append((code, where, message))

    def confirm(self, question: str) -> bool:
        return True


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 with a small trained tokenizer, as a Hugging Face directory."""
    directory = make_byte_level(tmp_path_factory.mktemp("models") / "tiny")
    vocabulary = json.loads((directory / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    oracle = make_oracle("qwen2", vocab_size=len(vocabulary) + 16, max_position_embeddings=4096)
    oracle.save_pretrained(directory)
    return directory


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "facts.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def start(home: Home, model_directory: Path, document: Path) -> Callable[..., Session]:
    """Opens a session on `document`; keyword arguments are groups of settings."""

    def open_it(
        reporter: Recorder | None = None,
        *,
        sources: list[str] | None = None,
        ingest: IngestOptions | None = None,
        **groups: dict[str, Any],
    ) -> Session:
        small: dict[str, dict[str, Any]] = {
            "model": {"source": str(model_directory)},
            "selection": {"n_init": 16, "n_local": 64, "top_k": 64, "chunk_size": 128},
            "engine": {"prefill_block": 256, "question_chunk_size": 64, "reread_tokens": 0},
            "answer": {"max_new_tokens": 12},
        }
        merged = {
            name: {**small.get(name, {}), **groups.get(name, {})} for name in {*small, *groups}
        }
        return open_session(
            settings=Settings.model_validate(merged),
            home=home,
            sources=sources or [str(document)],
            ingest=ingest or IngestOptions(),
            reporter=reporter or Recorder(),
            offline=True,
        )

    return open_it
