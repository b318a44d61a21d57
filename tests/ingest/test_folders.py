"""Folders and repositories: what is read, what is left out, and that both are named."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ingest.making import make_pdf, make_tree, read, run_git, texts
from tsdoc.errors import InputError
from tsdoc.ingest.document import Document

NOBODY = 65_534


def reasons(document: Document) -> dict[str, str]:
    return {entry.name: entry.reason for entry in document.skipped}


def test_files_come_in_path_order_with_names_relative_to_the_source(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "r", {"b/x.py": "1\n", "b.py": "2\n", "a/z/q.py": "3\n"})
    assert list(texts(read(root))) == ["a/z/q.py", "b/x.py", "b.py"]


def test_links_are_named_and_never_followed(tmp_path: Path) -> None:
    outside = make_tree(tmp_path / "outside", {"secret.txt": "SECRET\n"})
    root = make_tree(tmp_path / "r", {"src/real.py": "REAL\n"}, git=True)
    (root / "out.txt").symlink_to(outside / "secret.txt")
    (root / "outdir").symlink_to(outside)
    (root / "src" / "up").symlink_to("..")
    (root / "loop").symlink_to("loop")
    (root / "again.py").symlink_to("src/real.py")
    document = read(root)
    assert texts(document) == {"src/real.py": "REAL\n"}
    assert set(reasons(document).values()) == {"link"}
    assert len(document.skipped) == 5


@pytest.mark.parametrize("folder_first", [True, False])
def test_a_link_that_is_a_source_itself_is_not_called_left_out(
    tmp_path: Path, folder_first: bool
) -> None:
    outside = make_tree(tmp_path / "outside", {"said.md": "SAID\n", "other.md": "OTHER\n"})
    root = make_tree(tmp_path / "r", {"a.md": "A\n"})
    for name in ("said.md", "other.md"):
        (root / f"to-{name}").symlink_to(outside / name)
    sources = [root, root / "to-said.md"]
    document = read(*(sources if folder_first else reversed(sources)))
    prefix = "" if folder_first else "r/"
    assert set(texts(document)) == {f"{prefix}a.md", "to-said.md"}
    assert reasons(document) == {f"{prefix}to-other.md": "link"}


def test_a_tracked_folder_that_became_a_link_is_not_entered(tmp_path: Path) -> None:
    outside = make_tree(tmp_path / "outside", {"f.txt": "SECRET\n"})
    root = make_tree(tmp_path / "r", {"d/f.txt": "ok\n", "a.txt": "a\n"}, git=True)
    run_git(root, "add", ".")
    (root / "d" / "f.txt").unlink()
    (root / "d").rmdir()
    (root / "d").symlink_to(outside)
    document = read(root)
    assert texts(document) == {"a.txt": "a\n"}


def test_pipes_and_sockets_are_named_and_do_not_block(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "r", {"a.py": "1\n"}, git=True)
    os.mkfifo(root / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "sock"))
        assert reasons(read(root)) == {
            "pipe.txt": "not a regular file",
            "sock": "not a regular file",
        }


@pytest.fixture
def own_folder() -> Iterator[Path]:
    """A folder that a user who is not root owns and reaches; for root that is `NOBODY`."""
    with tempfile.TemporaryDirectory() as name:  # tmp_path lies in a folder of root's alone
        folder = Path(name)
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        yield folder


def test_closed_files_and_folders_are_named(own_folder: Path) -> None:
    root = make_tree(
        own_folder / "r", {"a.py": "1\n", "no.py": "2\n", "locked/b.py": "3\n"}, git=True
    )
    (root / "no.py").chmod(0)
    (root / "locked").chmod(0)
    for path in (root, *root.rglob("*")):
        os.chown(path, own_folder.stat().st_uid, own_folder.stat().st_gid)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.ingest.read_as_owner", str(root)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "HOME": str(own_folder)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        (root / "locked").chmod(0o700)
    assert done.returncode == 0, done.stderr
    by_starter, by_owner = json.loads(done.stdout)
    assert by_owner == {
        "uid": own_folder.stat().st_uid,
        "texts": {"a.py": "1\n"},
        "unreadable": ["locked/", "no.py"],
    }
    if by_starter["uid"] == 0:  # nothing but these permissions is in the owner's way
        assert list(by_starter["texts"]) == ["a.py", "locked/b.py", "no.py"]


def test_what_is_left_out_by_default_is_named(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "a.py": "1\n",
        "package-lock.json": "{}\n",
        "lib.min.js": "x\n",
        "bundle.js": "var a=1;" * 1000,
        "plain.js": "var a = 1;\n" * 1000,
        "pic.png": b"\x89PNG\r\n\x1a\n\0\0",
        "empty.py": "",
        "blank.py": "\n\n",
    }
    document = read(make_tree(tmp_path / "r", files))
    assert list(texts(document)) == ["a.py", "plain.js"]
    assert reasons(document) == {
        "bundle.js": "minified",
        "empty.py": "empty",
        "lib.min.js": "minified",
        "package-lock.json": "lock file",
        "pic.png": "binary",
        "blank.py": "no text",
    }


def test_include_brings_back_what_is_left_out_by_default(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "r", {"a.py": "1\n", "uv.lock": "x\n", "b.py": "2\n"})
    assert list(texts(read(root, include=("*.lock", "a.py")))) == ["a.py", "uv.lock"]
    assert list(texts(read(root, exclude=("b*",)))) == ["a.py"]
    assert reasons(read(root, include=("a.py",)))["b.py"] == "excluded"


def test_odd_names_are_shown_on_one_line_and_are_valid_unicode(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path / "r", {"new\nline.py": "1\n", "-rf.py": "2\n", "caf\u00e9.py": "3\n"}
    )
    Path(os.fsdecode(os.fsencode(root) + b"/bad\xf5.py")).write_text("4\n")
    names = list(texts(read(root)))
    assert names == ["-rf.py", "bad\\xf5.py", "caf\u00e9.py", "new\\nline.py"]
    assert all(name.encode() for name in names)


def test_a_folder_that_a_repository_ignores_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "r", {".gitignore": "build/\n", "build/o.txt": "1\n"}, git=True)
    document = read(root / "build")
    assert list(texts(document)) == ["o.txt"]
    assert [warning.code for warning in document.warnings] == ["folder"]


def test_without_git_the_same_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {".gitignore": "*.tmp\n", "s/.gitignore": "!k.tmp\n", "s/k.tmp": "1\n", "x.tmp": "2\n"}
    root = make_tree(tmp_path / "r", files, git=True)
    with_git = read(root)
    monkeypatch.setenv("PATH", str(tmp_path))
    without = read(root)
    assert texts(with_git) == texts(without)
    assert [(w.code, w.message) for w in without.warnings] == [
        ("folder", "git is not installed; ignore rules were applied without git")
    ]


def test_a_hostile_repository_runs_nothing(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "r", {"a.txt": "1\n"}, git=True)
    trace = tmp_path / "trace"
    script = tmp_path / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {trace}\n")
    script.chmod(0o755)
    for key in ("core.fsmonitor", "core.sshCommand", "core.pager", "core.editor", "diff.external"):
        run_git(root, "config", key, str(script))
    run_git(root, "config", "core.hooksPath", str(tmp_path))
    run_git(root, "config", "filter.x.clean", str(script))
    (root / ".gitattributes").write_text("* filter=x\n")
    assert "a.txt" in texts(read(root))
    assert not trace.exists()


def test_nothing_is_written_into_a_source(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "r", {"a.txt": "1\n"}, git=True)
    run_git(root, "add", ".")
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    read(root)
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before


def test_every_known_kind_in_a_folder_goes_to_its_reader(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "a.pdf": make_pdf(["BT /F1 11 Tf 72 700 Td (from the pdf) Tj ET"]),
        "b.md": "# T\ntext\n",
        "bad.pdf": "<!doctype html><p>Sign in</p>",
        "c.html": "<p>from the page</p>",
    }
    document = read(make_tree(tmp_path / "r", files))
    assert [file.kind for file in document.files] == ["pdf", "markdown", "html"]
    assert reasons(document) == {"bad.pdf": "not readable"}
    assert [(w.code, w.where) for w in document.warnings] == [("unreadable", "bad.pdf")]


def test_a_folder_with_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "r", {"pic.png": b"\x89PNG\0\0", "e.txt": ""})
    with pytest.raises(InputError, match=r"holds no file .*left out: binary, empty"):
        read(root)
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="holds no file"):
        read(tmp_path / "none")
