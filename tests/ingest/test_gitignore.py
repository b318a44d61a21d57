"""Ignore rules: the built-in walker agrees with git."""

from __future__ import annotations

import os
import tempfile
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
    """What git lists, with the files of repositories inside it, without files that are gone."""
    out = run_git(folder, "ls-files", "-co", "--exclude-standard", "-z")
    paths: set[str] = set()
    for path in (os.fsdecode(path).rstrip("/") for path in out.split(b"\0") if path):
        full = folder / path
        if full.is_dir() and not full.is_symlink():
            paths.update(f"{path}/{inner}" for inner in by_git(full))
        elif os.path.lexists(full):
            paths.add(path)
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


PLACES = ("", "d/", "d/e/", "x y/")
FOLDERS = st.sampled_from(PLACES)
PATHS = st.sampled_from([place + name for place in PLACES for name in ("a", "b.c", "[z]")])
LINKS = st.sampled_from(["l", "d/l", "d/e/l.c"])


@settings(max_examples=25, deadline=None)
@given(
    files=st.sets(PATHS, min_size=1),
    rules=st.dictionaries(FOLDERS, RULES, max_size=3),
    exclude=RULES,
    user=RULES,
    tracked=st.sets(PATHS),
    deleted=st.sets(PATHS, max_size=2),
    links=st.dictionaries(LINKS, st.sampled_from(["..", "gone"])),
    inner=st.sampled_from(["none", "repository", "submodule"]),
    inner_rules=RULES,
)
def test_random_repositories_are_listed_as_git_lists_them(
    files: set[str],
    rules: dict[str, str],
    exclude: str,
    user: str,
    tracked: set[str],
    deleted: set[str],
    links: dict[str, str],
    inner: str,
    inner_rules: str,
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        base = Path(folder)
        patch.setenv("GIT_CONFIG_GLOBAL", str(base / "config"))
        (base / "config").write_text(f'[Core]\n\texcludesFile = "{base}/mine" ; a comment\n')
        (base / "mine").write_bytes(user.encode())
        root = make_tree(base / "r", dict.fromkeys(files, "1"), git=True)
        for link, target in links.items():
            (root / link).parent.mkdir(exist_ok=True, parents=True)
            (root / link).symlink_to(target)
        for place, text in rules.items():
            make_tree(root, {f"{place}.gitignore": text})
        make_tree(root, {".git/info/exclude": exclude})
        if added := sorted(tracked & files):
            run_git(root, "--literal-pathspecs", "add", "-f", "--", *added)
        for name in deleted & files:
            (root / name).unlink()
        if inner != "none":
            make_tree(root / "in", {"i": "1", "a": "1", ".gitignore": inner_rules}, git=True)
            run_git(root / "in", "commit", "-q", "--allow-empty", "-m", "x")
        if inner == "submodule":
            run_git(root, "add", "-f", "in")
        expected = by_git(root)
        assert walk(root).paths == expected
        assert list_folder(root).paths == expected


@pytest.mark.parametrize(
    "config",
    [
        "[core]\n\texcludesFile = {0}/mine\n",
        '[core "x"]\n\texcludesfile = no\n[CORE] EXCLUDESFILE="{0}/mi\\\nne"#\n',
        "[include]\n\tpath = {0}/more\n",
        "[core]\n\texcludesFile = no\n[include]\n\tpath = more\n",
    ],
)
def test_the_users_ignore_file_is_found_as_git_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("GIT_CONFIG_GLOBAL", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    dotfiles = make_tree(tmp_path / "dotfiles", {"ignore": "*.tmp\n"})
    (tmp_path / "mine").symlink_to(dotfiles / "ignore")
    (tmp_path / ".gitconfig").write_text(config.format(tmp_path))
    (tmp_path / "more").write_text("[core]\nexcludesFile = ~/mine\n")
    root = make_tree(tmp_path / "r", {"a.py": "1", "b.tmp": "1"}, git=True)
    assert by_git(root) == ["a.py"]
    assert walk(root).paths == ["a.py"]


def test_a_linked_work_tree_has_the_rules_of_its_main_one(tmp_path: Path) -> None:
    main = make_tree(tmp_path / "main", {"a": "1"}, git=True)
    make_tree(main, {".git/info/exclude": "*.tmp\n"})
    run_git(main, "add", ".")
    run_git(main, "commit", "-q", "-m", "x")
    run_git(main, "worktree", "add", "-q", str(tmp_path / "linked"))
    make_tree(tmp_path / "linked", {"b.tmp": "1", "c": "1"})
    assert by_git(tmp_path / "linked") == ["a", "c"]
    assert walk(tmp_path / "linked").paths == ["a", "c"]


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
