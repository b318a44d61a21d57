"""File names that would break a terminal, a table or JSON come out on one line, as they are."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tsdoc.cli.app import main

NAMES = {
    "new\nline.py": "new\\nline.py",
    "bidi\u202etxt.py": "bidi\\u202etxt.py",
    "[bold]x[bold].py": "[bold]x[bold].py",
    "esc\x1b[31m.py": "esc\\x1b[31m.py",
    "tab\tx.py": "tab\\tx.py",
    'quote"<&>.py': 'quote"<&>.py',
    "-rf.py": "-rf.py",
    "pct%20x.py": "pct%20x.py",
    "smile\U0001f600.py": "smile\U0001f600.py",
    "bad\udcf5.py": "bad\\xf5.py",
}
# What a terminal or a reader of bytes would act upon.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TSDOC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    root = tmp_path / "odd"
    root.mkdir()
    for name in NAMES:
        (root / name).write_bytes(b"x = 1\n")
    (root / "image\u202e\n.png").write_bytes(b"\x89PNG\0\0")  # is left out
    (root / "legacy\n\u202e.txt").write_bytes("Ça va, où est le café déjà vu ?".encode("cp1252"))
    return root


def output(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[str, str]:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert not end.value.code
    out, err = capsys.readouterr()
    assert not UNSAFE.search(out + err)
    return out, err


def test_text_names_each_file_on_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = output(capsys, "text", str(folder))
    for shown in NAMES.values():
        escaped = shown.replace("&", "&amp;").replace('"', "&quot;")
        escaped = escaped.replace("<", "&lt;").replace(">", "&gt;")
        assert f'<document name="{escaped}">\n' in out
        assert f"- {shown}\n" in out
    assert "left out: image\\u202e\\n.png (binary, 6 B)\n" in err
    assert "warning: legacy\\n\\u202e.txt: not UTF-8; read as cp1252 (a guess)\n" in err


def test_tokens_names_each_file_on_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = output(capsys, "tokens", "--offline", str(folder))
    for shown in NAMES.values():
        assert f"─ {shown}\n" in out


@pytest.mark.parametrize("command", ["text", "tokens"])
def test_json_is_valid_unicode(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    out, _ = output(
        capsys, command, "--json", *(["--offline"] * (command == "tokens")), str(folder)
    )
    answer: dict[str, Any] = json.loads(out.encode("utf-8"))
    files = answer["files"] if command == "tokens" else answer["document"]["files"]
    skipped = answer["skipped"] if command == "tokens" else answer["document"]["skipped"]
    names = [file["name"] for file in files]
    assert sorted(names) == sorted([*NAMES.values(), "legacy\\n\\u202e.txt"])
    assert {file["path"] for file in files} == {
        str(folder / name) for name in (*NAMES, "legacy\n\u202e.txt")
    }
    assert [file["name"] for file in skipped] == ["image\\u202e\\n.png"]
    assert all(os.fsencode(name) == name.encode("utf-8") for name in names)
    assert answer["warnings"][0]["where"] == "legacy\\n\\u202e.txt"
