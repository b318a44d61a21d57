"""Whose TSDOC_HOME is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tsdoc.errors import StoreError, UsageError
from tsdoc.home import find_home


def test_a_relative_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSDOC_HOME", "here")
    with pytest.raises(UsageError, match="absolute"):
        find_home()


def test_a_home_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TSDOC_HOME", str(tmp_path))
    assert find_home().root == tmp_path
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(StoreError, match="another user"):
        find_home()
