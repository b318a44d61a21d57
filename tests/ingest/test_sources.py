"""Sources as a command gives them: order, names, duplicates, standard input, narrowing."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.ingest.making import lines, make_pdf, make_tree, read, texts, whole
from tsdoc.errors import InputError, PartialInputError, UsageError
from tsdoc.ingest.options import Limits
from tsdoc.ingest.sources import IngestOptions, fingerprint_sources, read_sources


class FakeStdin:
    """Standard input that holds bytes, or is a terminal."""

    closed = False

    def __init__(self, data: bytes, *, terminal: bool = False) -> None:
        self.buffer = io.BytesIO(data)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def test_sources_keep_their_order_and_equal_names_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a", "b", "c/b"):
        make_tree(tmp_path / folder, {"README.md": folder + "\n", "z.txt": "z\n"})
    document = read(tmp_path / "b", tmp_path / "a", tmp_path / "c" / "b" / "README.md")
    assert list(texts(document)) == [
        "README.md",
        "z.txt",
        "a/README.md",
        "a/z.txt",
        "b/README.md",
    ]
    assert [section.file for section in document.sections] == [0, 1, 2, 3, 4]


def test_duplicates_and_overlapping_folders_are_read_once(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "r", {"s/a.txt": "A\n", "b.txt": "B\n"})
    (tmp_path / "link").symlink_to(root)
    document = read(root / "s" / "a.txt", root, root / "s", tmp_path / "link")
    assert list(texts(document)) == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://example.org/a.pdf", "is a URL, and tsdoc reads files. Download it first"),
        ("no such file.txt", "no such file or folder"),
        ("empty.txt", "is empty"),
        ("blank.txt", "holds no text"),
        ("pic.png", "is a binary file"),
        ("pipe", "is not a regular file"),
        ("big.txt", "is too large"),
        ("x.pdf", "is not a PDF"),
    ],
)
def test_a_source_of_no_use_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tree(
        tmp_path,
        {
            "empty.txt": "",
            "blank.txt": " \n",
            "pic.png": b"\0\1",
            "big.txt": "x" * 99,
            "x.pdf": "y",
        },
    )
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=message) as caught:
        read(source, limits=Limits(text_bytes=50))
    assert caught.value.where == source
    assert "\n" not in str(caught.value)


def test_a_name_that_is_too_long_is_said_once() -> None:
    name = "z" * 300
    with pytest.raises(InputError) as caught:
        read(name)
    assert str(caught.value) == f"{name}: cannot be read (File name too long)"


def test_a_pipe_of_the_shells_gets_the_hint_of_a_named_one() -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(InputError, match="is not a regular file") as caught:
            read(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
        os.close(writing)
    assert caught.value.hint == "Pipe it in and name it '-'."


def test_no_source_and_impossible_pages_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read()
    with pytest.raises(UsageError, match="page range 5-3"):
        read(tmp_path, pages=((5, 3),))


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (b"just text\n", "text", "just text\n"),
        (b"<!doctype html><p>page</p>", "html", "page\n\n"),
        (make_pdf([lines("from a pdf")]), "pdf", "from a pdf\n"),
    ],
)
def test_standard_input_is_known_by_its_bytes(
    monkeypatch: pytest.MonkeyPatch, data: bytes, kind: str, text: str
) -> None:
    monkeypatch.setattr("sys.stdin", FakeStdin(data))
    options = IngestOptions()
    assert fingerprint_sources(["-"], options).num_bytes == len(data)
    document = read_sources(["-", "-"], options)
    assert [(file.name, file.kind, file.path) for file in document.files] == [("stdin", kind, None)]
    assert whole(document) == text


def test_a_terminal_is_no_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", FakeStdin(b"", terminal=True))
    with pytest.raises(InputError, match="standard input is a terminal"):
        read("-")
    monkeypatch.setattr("sys.stdin", FakeStdin(b""))
    with pytest.raises(InputError, match="standard input is empty"):
        read("-")


def test_the_fingerprint_changes_with_content_names_and_options_only(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("same size 1\n")
    before = path.stat()

    def digest(**options: object) -> str:
        return fingerprint_sources([str(path)], IngestOptions(**options)).digest  # type: ignore[arg-type]

    first = digest()
    assert digest(strict=True, password="x") == first
    assert len({first, digest(section="x"), digest(exclude=("b",))}) == 3
    path.write_text("same size 2\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest() != first
    path.write_text("same size 1\n")
    assert digest() == first
    assert (
        fingerprint_sources([str(path.rename(tmp_path / "b.txt"))], IngestOptions()).digest != first
    )


def test_the_fingerprint_changes_with_the_pages(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf([lines("one"), lines("two")]))
    wanted = (None, ((1, 1),), ((1, 2),))
    options = (IngestOptions(pages=pages) for pages in wanted)
    assert len({fingerprint_sources([str(path)], each).digest for each in options}) == 3


def test_the_fingerprint_does_not_depend_on_the_order(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path in paths:
        path.write_text(f"{path.name}\n")
    there = fingerprint_sources([str(p) for p in paths], IngestOptions())
    back = fingerprint_sources([str(p) for p in reversed(paths)], IngestOptions())
    assert there.digest == back.digest
    assert there.names == tuple(reversed(back.names)) == ("a.txt", "b.txt")


def test_the_fingerprint_sees_files_come_and_go(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "r", {"a.txt": "1\n"})
    first = fingerprint_sources([str(root)], IngestOptions())
    (root / "b.txt").write_text("")
    second = fingerprint_sources([str(root)], IngestOptions())
    assert first.digest != second.digest
    assert first.num_bytes == second.num_bytes == 2


def test_files_carry_size_and_hash_of_what_was_read(tmp_path: Path) -> None:
    import hashlib

    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (file,) = read(path).files
    assert (file.num_bytes, file.sha256) == (13, hashlib.sha256(path.read_bytes()).hexdigest())
    assert whole(read(path)) == "one\ntwo\n"


def test_a_section_is_found_by_its_heading(tmp_path: Path) -> None:
    text = "# Alpha\na\n## The  Beta part\nb\n### Gamma\nc\n# Delta\nd\n"
    root = make_tree(tmp_path / "r", {"a.md": text, "b.md": "# Other\nx\n"})
    assert whole(read(root, section="the beta part")) == "## The  Beta part\nb\n### Gamma\nc\n"
    document = read(root, section="beta")
    assert [file.name for file in document.files] == ["a.md"]
    assert document.locate(1, 0).line == 5
    with pytest.raises(InputError, match="no section is called 'zeta'"):
        read(root, section="zeta")


def test_an_unknown_section_names_the_nearest_at_every_depth(tmp_path: Path) -> None:
    parts = "".join(f"## Step {n}\nx\n" for n in range(6))
    text = f"# Guide\nx\n## Installing the server\nx\n### On Linux\nx\n{parts}"
    root = make_tree(tmp_path / "r", {"a.md": text})
    every = "`tsdoc tokens SOURCE --all` lists all 9 titles"
    with pytest.raises(InputError) as near:
        read(root, section="instaling the sever")
    assert near.value.hint == f'The nearest: "Installing the server". {every}.'
    with pytest.raises(InputError) as in_a_title:
        read(root, section="instalingg")
    assert '"Installing the server"' in (in_a_title.value.hint or "")
    for far in ("zzz", ""):
        with pytest.raises(InputError) as none:
            read(root, section=far)
        first = '"Guide", "Installing the server", "On Linux", "Step 0", "Step 1"'
        assert none.value.hint == f"None is like it; the first: {first}. {every}."


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path / "r",
        {
            "crlf.py": b"a\r\nb\r\nTARGET\r\n",
            "ff.py": "a\n\n\x0c\nb\n  TARGET\n",
            "u.js": "x\u2028y\x85z\nTARGET\n",
            "m.md": "intro\n\n# One\nx\n\n# Two\nTARGET\n",
        },
    )
    document = read(root)
    found = {}
    for number, section in enumerate(document.sections):
        if "TARGET" in section.text:
            place = document.locate(number, section.text.index("TARGET"))
            found[place.file] = place.line
    assert found == {"crlf.py": 3, "ff.py": 5, "m.md": 7, "u.js": 2}


def test_strict_stops_on_lost_text_and_not_on_a_guess(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "r", {"a.txt": "café\n".encode("latin-1"), "b.txt": "b\n"})
    assert [warning.code for warning in read(root, strict=True).warnings] == ["legacy_encoding"]
    (root / "bad.pdf").write_text("no pdf")
    with pytest.raises(PartialInputError, match=r"bad\.pdf: is not a PDF"):
        read(root, strict=True)


def test_progress_counts_bytes_to_the_total(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path / "r", {"a.txt": "12345\n", "b.pdf": make_pdf([lines("x"), lines("y")])}
    )
    seen: list[tuple[str, int, int]] = []
    read_sources([str(root)], IngestOptions(), lambda *step: seen.append(step))
    assert [name for name, _, _ in seen] == ["a.txt", "b.pdf", "b.pdf", "b.pdf"]
    done = [step[1] for step in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][2]


def test_a_document_can_be_written_as_json(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "r", {"a.txt": "x\n"})
    json.dumps(asdict(read(root)), default=str).encode("utf-8")


@pytest.mark.parametrize("cells", [[], [{}], [{"cell_type": "code", "source": []}, None, 3]])
def test_a_notebook_without_text_is_no_empty_document(tmp_path: Path, cells: list[object]) -> None:
    (tmp_path / "new.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    with pytest.raises(InputError, match="holds no text"):
        read(tmp_path / "new.ipynb")
    (tmp_path / "a.txt").write_text("A\n")
    document = read(tmp_path)
    assert list(texts(document)) == ["a.txt"]
    assert [(entry.name, entry.reason) for entry in document.skipped] == [("new.ipynb", "no text")]


def test_closed_standard_input_is_called_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InputError, match="is closed"):
        read("-")


def test_an_empty_name_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_tree(tmp_path, {"a.txt": "A\n"}))
    for ask in (read_sources, fingerprint_sources):
        with pytest.raises(InputError, match="name of a SOURCE is empty"):
            ask(["", "a.txt"], IngestOptions())
