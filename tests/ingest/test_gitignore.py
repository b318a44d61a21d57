"""Ignore rules: the built-in walker agrees with git."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from tests.ingest.making import make_tree, run_git
from tsdoc.ingest.gitignore import matches_glob, parse_rules
from tsdoc.ingest.gitindex import read_index
from tsdoc.ingest.repository import list_folder
from tsdoc.ingest.walk import walk

NAMES = ["a", "b.c", "d/a", "d/b.c", "d/e/a", "d/e/f.txt", "x y/a", "[z]", "d/#h", "!n", "w\\v"]
PATTERNS = st.sampled_from(
    [
        *("*", "!*/", "!*.c", "a", "/a", "d/", "!d/", "d/*", "!d/e", "**/a", "d/**", "!d/**/a"),
        *("d/**/f.txt", "[a-c]*", "[!a]", "\\[z\\]", "\\#h", "\\!n", "*.[ct]*", "x y/", "x\\ y/"),
        *("# comment", "", "  ", "/", "e/", "f.txt  ", "f.txt\\ ", "?", "**", "a**", "w\\\\v"),
        *("[[:alpha:]]", "[]]", "[", "d/e/", "/d/*/a", "*/a", "!a\r"),
    ]
)
RULES = st.lists(PATTERNS, max_size=5).map("\n".join)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("repo"), dict.fromkeys(NAMES, "1\n"), git=True)


def by_git(folder: Path) -> list[str]:
    out = run_git(folder, "ls-files", "-co", "--exclude-standard", "-z")
    paths = [os.fsdecode(path) for path in out.split(b"\0") if path]
    return sorted(paths, key=lambda path: path.split("/"))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(top=RULES, inner=RULES)
def test_the_walker_lists_what_git_lists(tree: Path, top: str, inner: str) -> None:
    (tree / ".gitignore").write_bytes(top.encode())
    (tree / "d" / ".gitignore").write_bytes(inner.encode())
    assert walk(tree).paths == by_git(tree)
    assert walk(tree / "d").paths == by_git(tree / "d")


def test_ignored_files_in_the_index_count_and_nested_repositories_are_entered(
    tmp_path: Path,
) -> None:
    names = {"kept/by.index": "1", "kept/other": "1", "x": "1", ".gitignore": "kept/\n"}
    root = make_tree(tmp_path / "r", names, git=True)
    run_git(root, "add", "-f", "kept/by.index")
    make_tree(root / "inner", {"i": "1", "o.tmp": "1", ".gitignore": "*.tmp\n"}, git=True)
    run_git(root / "inner", "commit", "-q", "--allow-empty", "-m", "x")
    expected = [".gitignore", "inner/.gitignore", "inner/i", "kept/by.index", "x"]
    assert list_folder(root).paths == expected
    assert walk(root).paths == expected


@pytest.mark.parametrize("version", [2, 3, 4])
def test_every_index_version_is_read(tmp_path: Path, version: int) -> None:
    names = ["a", "a.b", "dir/long name ü", "dir/long name ü2"]
    root = make_tree(tmp_path, dict.fromkeys(names, "1"), git=True)
    run_git(root, "add", ".")
    if version == 3:
        (root / "later").write_text("1")
        run_git(root, "add", "-N", "later")
        names.append("later")
    else:
        run_git(root, "update-index", f"--index-version={version}")
    assert read_index(root) == frozenset(names)


def test_a_damaged_index_is_no_index(tmp_path: Path) -> None:
    root = make_tree(tmp_path, {"a": "1"}, git=True)
    for data in (b"", b"DIRC", b"DIRC\0\0\0\x02\xff\xff\xff\xff", b"DIRC\0\0\0\x04\0\0\0\x01" * 9):
        (root / ".git" / "index").write_bytes(data)
        assert read_index(root) <= {"", "a"}


@pytest.mark.parametrize(
    ("pattern", "path", "matched"),
    [
        ("docs/", "docs/a/b.md", True),
        ("*.md", "docs/a/b.md", True),
        ("docs/*.md", "docs/a/b.md", False),
        ("/a", "docs/a", False),
        ("src/**/test_*", "src/x/y/test_z.py", True),
    ],
)
def test_globs_match_files_and_the_folders_above_them(
    pattern: str, path: str, *, matched: bool
) -> None:
    assert matches_glob(parse_rules(pattern), path) is matched
