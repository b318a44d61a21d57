"""The hard inputs that lie beside the repository come out as their `expected.json` says.

Every input has a test of its own making elsewhere; this one sees to it that none is missed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import tsdoc
from tsdoc.cli.app import main

if TYPE_CHECKING:
    from tsdoc.models.locate import LocatedModel

REPOSITORY = Path(tsdoc.__file__).parents[1]
MAKER = REPOSITORY.parent / "shared" / "cases" / "make_cases.py"
pytestmark = pytest.mark.skipif(not MAKER.is_file(), reason="the cases are not here")

FAILS = {"docx_bomb", "epub_drm", "epub_zip_bomb"}
WARNINGS = {
    "cid_font_no_tounicode": r"page 1: text cannot be decoded \(a font has no Unicode map\)",
    "fifo_and_unreadable": r"left out: pipe.txt \(not a regular file",
    "legacy_encodings": r"sjis.java: not UTF-8; read as cp932[\s\S]*|gbk.txt: not UTF-8",
    "ligature_private_use": r"page 1: has private-use characters: letters may be missing",
    "nested_flate_bomb": r"page 2: is too large when decompressed",
    "page_tree_cycle": r"page 2: cannot be loaded",
    "scan_pages_no_text": r"pages 2–3: have no text; OCR needed",
    "startxref_wrong": r"is damaged and was repaired",
}
# Cases that are warned about in words of tsdoc's own.
LOUD = {
    "aes_empty_user_password",
    "gitignore_not_utf8",
    "html_declared_charset",
    "no_xref_table",
    "not_a_pdf",
}
PROVENANCE = {
    "ff.py": ("SECRET_TARGET", 6),
    "u2028.js": ("TARGET", 2),
    "crlf.py": ("TARGET", 3),
}


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    seconds: float


@dataclass(frozen=True)
class Case:
    folder: Path
    expect: dict[str, Any]

    @property
    def source(self) -> str:
        inputs = [p for p in sorted(self.folder.iterdir()) if p.name != "expected.json"]
        return str(inputs[0] if len(inputs) == 1 else self.folder)


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    pytest.importorskip("docx")
    root = tmp_path_factory.mktemp("cases")
    subprocess.run([sys.executable, str(MAKER), str(root)], check=True, capture_output=True)
    return {
        f"{path.parent.parent.name}/{path.parent.name}": Case(
            path.parent, json.loads(path.read_text("utf-8"))["expect"]
        )
        for path in root.glob("*/*/expected.json")
    }


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    monkeypatch.setenv("TSDOC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def invoke(*args: str) -> Result:
        capsys.readouterr()
        began = time.monotonic()
        with pytest.raises(SystemExit) as end:
            main(args)
        seconds = time.monotonic() - began
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return Result(int(end.value.code or 0), out, err, seconds)

    return invoke


def check_text(expect: dict[str, Any], text: str) -> None:
    present = expect.get("present", [])
    for needle in present.values() if isinstance(present, dict) else present:
        assert needle in text
    for choices in expect.get("present_any", []):
        assert any(choice in text for choice in choices), choices
    for key in ("absent", "absent_in_body", "absent_as_clean_text", "content_absent"):
        for needle in expect.get(key, []):
            # The titles of a book's contents belong to its sections, not to its body.
            body = re.sub(r"<document .*?>|- .*\n", "", text) if key == "absent_in_body" else text
            assert needle not in body
    for needle, times in expect.get("count", {}).items():
        assert text.count(needle) == times
    at = -1
    for needle in expect.get("order", []):
        at = text.find(needle, at + 1)
        assert at >= 0, needle
    if "absent_regex" in expect:
        assert not re.search(expect["absent_regex"], text)


@pytest.mark.parametrize("kind", ["pdf", "book", "repo"])
def test_every_document_comes_out_as_expected(
    cases: dict[str, Case], run: Callable[..., Result], kind: str
) -> None:
    names = [name for name in sorted(cases) if name.startswith(f"{kind}/")]
    assert names
    for name in names:
        case, short = cases[name], name.partition("/")[2]
        result = run("text", case.source)
        assert result.code == (3 if short in FAILS else 0), name
        check_text(case.expect, result.out)
        warnings = [line for line in result.err.splitlines() if line.startswith("warning")]
        assert bool(warnings) <= bool(WARNINGS.get(short, short in LOUD)), warnings
        assert re.search(WARNINGS.get(short, ""), result.err), (name, result.err)
        if "error" in case.expect:
            assert case.expect["error"].removeprefix("this EPUB ") in result.err
            assert len(result.err.splitlines()) == 1
        assert result.seconds < 2 * case.expect.get("seconds_max", 30)


def test_repositories_list_what_is_read_and_what_is_not(
    cases: dict[str, Case], run: Callable[..., Result]
) -> None:
    for name in [name for name in sorted(cases) if name.startswith("repo/")]:
        expect = cases[name].expect
        answer = json.loads(run("text", "--json", cases[name].source).out)
        read = [file["name"] for file in answer["document"]["files"]]
        skipped = [file["name"] for file in answer["document"]["skipped"]]
        assert set(expect.get("included", [])) <= set(read), name
        assert not set(expect.get("excluded", [])) & {*read, *skipped}, name
        assert set(expect.get("listed", [])) <= {*read, *skipped}, name
        assert len(read) == expect.get("included_count", len(read)), name
        assert len(read) == len(set(read))
        assert all("\n" not in shown for shown in read + skipped)
        if expect.get("each_real_file_once"):
            assert read == ["lib/l.py", "src/real.py"]


def test_places_are_those_that_editors_show(cases: dict[str, Case]) -> None:
    from tests.ingest.making import read

    document = read(cases["repo/line_numbers_form_feed"].source)
    for number, section in enumerate(document.sections):
        needle, line = PROVENANCE[document.files[section.file].name]
        assert document.locate(number, section.text.index(needle)).line == line
    notebook = read(cases["repo/notebook_base64"].source)
    place = notebook.locate(0, notebook.sections[0].text.index("Max Training"))
    assert str(place) == "nb.ipynb cell 2"
    chapters = read(cases["book/epub_nested_toc_one_file"].source)
    assert [section.titles for section in chapters.sections] == [
        ("Part I", "Chapter 1"),
        ("Part I", "Chapter 2"),
        ("Part II",),
    ]


def test_a_notebook_stays_small(cases: dict[str, Case], run: Callable[..., Result]) -> None:
    case = cases["repo/notebook_base64"]
    answer = json.loads(run("tokens", "--offline", "--json", case.source).out)
    assert answer["tokens"] < case.expect["tokens_max"]


def test_files_that_are_no_pdf_are_named_one_by_one(
    cases: dict[str, Case], run: Callable[..., Result]
) -> None:
    case = cases["pdf/not_a_pdf"]
    folder = run("text", case.source)
    assert "good neighbour" in folder.out
    assert "login.pdf: is not a PDF" in folder.err
    assert "left out: empty.pdf (empty" in folder.err
    for name, message in (("empty.pdf", "is empty"), ("login.pdf", "is not a PDF")):
        result = run("text", str(case.folder / name))
        assert (result.code, message in result.err) == (3, True)


def test_control_tokens_in_a_source_are_text(
    cases: dict[str, Case], run: Callable[..., Result]
) -> None:
    source = cases["repo/special_tokens_in_source"].source
    text = Path(source, "chat.py").read_text("utf-8")
    assert text in run("text", source).out


def test_nothing_is_written_into_a_read_only_source(
    cases: dict[str, Case], run: Callable[..., Result]
) -> None:
    source = Path(cases["repo/readonly_source"].source)
    paths = [source, *source.rglob("*")]
    before = {path: path.stat().st_mtime_ns for path in paths}
    modes = {path: path.stat().st_mode for path in paths}
    try:
        for path in reversed(paths):
            path.chmod(modes[path] & ~0o222)
        assert run("text", str(source)).code == 0
        assert {path: path.stat().st_mtime_ns for path in [source, *source.rglob("*")]} == before
    finally:
        for path in paths:
            path.chmod(stat.S_IMODE(modes[path]))


@pytest.mark.parametrize(
    "name",
    ["pdf/nested_flate_bomb", "book/epub_zip_bomb", "book/docx_bomb"],
)
def test_bombs_stay_within_their_memory(cases: dict[str, Case], name: str, tmp_path: Path) -> None:
    case = cases[name]
    script = (
        "import re, resource, sys\n"
        "from pathlib import Path\n"
        "from tsdoc.cli.app import main\n"
        "try: main(['text', sys.argv[1]])\n"
        "except SystemExit: pass\n"
        # Not ru_maxrss: a process inherits that of the one which started it.
        "status = Path('/proc/self/status').read_text()\n"
        "own = int(re.search(r'VmHWM:\\s+(\\d+)', status)[1])\n"
        "child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "sys.stderr.write(f'\\n{(own + child) // 1024}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, case.source],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TSDOC_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stderr.splitlines()[-1]) < case.expect["rss_mb_max"]


def test_models_that_cannot_be_used_are_one_clear_line(
    cases: dict[str, Case], run: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("Text.\n")
    for name, file in (
        ("gguf_unknown_arch", "m.gguf"),
        ("gguf_cut_or_not", "cut.gguf"),
        ("gguf_cut_or_not", "lfs.gguf"),
    ):
        case = cases[f"model/{name}"]
        model = str(case.folder / file)
        result = run("ask", str(tmp_path / "a.txt"), "Why?", "--model", model)
        assert result.code == 4
        assert case.expect["error"].replace("nosucharch", "'nosucharch'") in result.err or (
            case.expect["error"] in result.err
        )
        assert len(result.err.splitlines()) == 1


@pytest.fixture
def tiny(packaged_model: Callable[[str], LocatedModel]) -> list[str]:
    """Options that use the `tiny` model where it lies."""
    return ["--model", str(packaged_model("tiny").directory)]


def start(*args: str, home: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tsdoc", *args],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TSDOC_HOME": str(home), **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
    )


@pytest.mark.model
def test_a_document_longer_than_the_window_is_refused(
    cases: dict[str, Case], run: Callable[..., Result], tiny: list[str]
) -> None:
    source = str(cases["model/context_overflow"].folder / "long.txt")
    window = ["--set", "prompt.max_prompt_tokens=4096"]
    result = run("ask", source, "What is the pass phrase?", *window, *tiny, "--json")
    assert result.code == 6
    assert re.search(r"the prompt is [\d,]+ tokens long and the limit is 4,096", result.err)
    assert json.loads(result.out)["error"]["code"] == "resources"


@pytest.mark.model
def test_control_tokens_in_a_source_give_no_orders(
    cases: dict[str, Case], run: Callable[..., Result], tiny: list[str]
) -> None:
    source = cases["repo/special_tokens_in_source"].source
    result = run("ask", source, "Which file is this?", *tiny, "--max-new-tokens", "16")
    assert result.code == 0
    assert "PWNED" not in result.out


@pytest.mark.model
@pytest.mark.parametrize(
    "environment", [{"PYTHONIOENCODING": "cp1252"}, {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}]
)
def test_answers_come_out_in_any_encoding(
    cases: dict[str, Case], tmp_path: Path, tiny: list[str], environment: dict[str, str]
) -> None:
    source = str(cases["cli/cp1252_stdout"].folder / "symbols.txt")
    args = ("ask", source, "Quote the symbol line.", *tiny, "--max-new-tokens", "12")
    with start(*args, home=tmp_path, **environment) as process:
        out, err = process.communicate(timeout=300)
    assert (process.returncode, "Traceback" in err, bool(out.strip())) == (0, False, True)


@pytest.mark.model
@pytest.mark.parametrize("moment", ["import", "prefill", "answer"])
def test_ctrl_c_ends_in_one_line_and_leaves_nothing_half_done(
    cases: dict[str, Case], tmp_path: Path, tiny: list[str], moment: str
) -> None:
    source, home = cases["cli/ctrl_c"].folder / "doc.txt", tmp_path / "home"
    if moment == "answer":
        source = tmp_path / "short.txt"
        source.write_text("Box 7 is red.\n" * 20)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    with start("ask", str(source), "Tell a long story.", *tiny, "--quiet", home=home) as process:
        wait_for(moment, process, home)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.fullmatch(r"tsdoc: stopped[^\n]*\n", err)
    assert not [path for path in leftovers(home) if path.name.startswith((".", "tmp"))]


def wait_for(moment: str, process: subprocess.Popen[str], home: Path) -> None:
    """Returns when a process has come to a moment, however long that takes here."""
    if moment == "answer":
        assert process.stdout is not None
        assert process.stdout.read(1)
        return
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        if moment == "prefill" and list(home.rglob("kv.bin")):
            return
        if moment == "import" and watched.cpu_times().user > 0.3:  # Python itself is up by then
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate())


def leftovers(home: Path) -> Iterator[Path]:
    """Files that a finished command would not have left; locks stay, for the next owner."""
    return (path for path in home.rglob("*") if path.is_file() and "lock" not in path.name)
