from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.damage import IDS
from tests.store.synthetic import build
from tsdoc.store import Store


class Warnings(list[tuple[str, str, str]]):
    """Collects (code, where, message)."""

    def __call__(self, code: str, where: str, message: str) -> None:
        self.append((code, where, message))

    @property
    def codes(self) -> set[str]:
        return {code for code, _, _ in self}


@pytest.fixture
def warnings() -> Warnings:
    return Warnings()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path, warnings: Warnings) -> Store:
    return Store(root, max_bytes=1 << 30, on_warning=warnings)


@pytest.fixture
def built(store: Store, root: Path) -> Path:
    """A store with one finished entry, of IDS."""
    build(store, IDS, meta={"sources": ["doc.txt"]})[0].close()
    return root
