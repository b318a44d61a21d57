"""What a shell completes: names of what is kept in the home, and nothing where it is unreadable."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tsdoc.cli import completion
from tsdoc.cli.services import Services
from tsdoc.errors import StoreError
from tsdoc.models.profiles import list_profiles


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TSDOC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_profiles_and_settings_are_completed() -> None:
    assert completion.profiles("") == [profile.name for profile in list_profiles()]
    assert completion.profiles("ti") == ["tiny"]
    assert completion.settings("answer.s") == ["answer.seed=", "answer.stop_loops="]
    assert completion.settings("nothing") == []


def test_an_entry_is_completed_by_its_id_and_by_a_name_that_it_alone_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = [
        SimpleNamespace(entry_id=f"{number}" * 32, name=name)
        for number, name in enumerate(("book.pdf", "book.pdf", "bo\x1b.md"))
    ]
    store = SimpleNamespace(list=lambda: kept)
    monkeypatch.setattr(Services, "open_store", lambda self, home, **options: store)
    assert completion.entries("bo") == ["bo\\x1b.md"]
    assert completion.entries("") == ["bo\\x1b.md", "0000000000", "1111111111", "2222222222"]


def test_conversations_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"heirs": None, "house": None}
    monkeypatch.setattr(Services, "list_conversations", lambda self, home: kept)
    assert completion.conversations("he") == ["heirs"]


def test_an_empty_home_completes_nothing_and_is_not_made(home: Path) -> None:
    assert completion.entries("") == completion.conversations("") == []
    assert not home.exists()


def test_a_home_that_cannot_be_read_completes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Services) -> None:
        raise StoreError("belongs to another user")

    monkeypatch.setattr(Services, "home", refuse)
    assert completion.entries("") == completion.conversations("") == []
