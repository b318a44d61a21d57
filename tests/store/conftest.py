import pytest

from tests.store.damage import IDS
from tests.store.synthetic import build
from tsdoc.store import Store


class Warnings(list):
    """Collects (code, where, message)."""

    def __call__(self, code, where, message):
        self.append((code, where, message))

    @property
    def codes(self):
        return {code for code, _, _ in self}


@pytest.fixture
def warnings():
    return Warnings()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(root, warnings):
    return Store(root, max_bytes=1 << 30, on_warning=warnings)


@pytest.fixture
def built(store, root):
    """A store with one finished entry, of IDS."""
    build(store, IDS, meta={"sources": ["doc.txt"]})[0].close()
    return root
