"""The command as a process: what it imports, closed pipes, full disks, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import tsdoc
from tsdoc.__main__ import SUITED

REPOSITORY = Path(tsdoc.__file__).parents[1]
NOWHERE = "/nonexistent"  # neither the user's settings nor models take part
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY),
    "COLUMNS": "80",
    "TSDOC_HOME": NOWHERE,
    "XDG_CONFIG_HOME": NOWHERE,
}
HEAVY = ["torch", "transformers", "pypdf", "pypdfium2", "pydantic", "numpy", "gguf", "tokenizers"]


def run(
    *args: str, stdin: str | None = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tsdoc", *args],
        input=stdin,
        env={**ENVIRONMENT, **(env or {})},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("args", [["--help"], ["--version"]])
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    script = f"""
        import sys
        from tsdoc.__main__ import main
        sys.argv = ["tsdoc", *{args!r}]
        try:
            main()
        except SystemExit as end:
            assert not end.code, end.code
        heavy = [name for name in {HEAVY!r} if name in sys.modules]
        assert not heavy, heavy
    """
    done = run_script(script)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("shell_name", "words", "expected"),
    [
        ("bash", "tsdoc summ", "summarize"),
        ("zsh", "tsdoc cache v", "verify"),
        ("fish", "tsdoc chat --forg", "--forget"),
        ("bash", "tsdoc ask a.txt --profile emb", "embedded"),
        ("zsh", "tsdoc models use ti", "tiny"),
        ("fish", "tsdoc profiles show ti", "tiny"),
        ("bash", "tsdoc ask a.txt --set selection.to", "selection.top_k="),
    ],
)
def test_completion_is_offered(shell_name: str, words: str, expected: str) -> None:
    env = {
        "_TSDOC_COMPLETE": f"complete_{shell_name}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = run(env=env)
    assert expected in done.stdout
    assert "ingest" not in done.stdout


def shell(command: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            "bash",
            "-c",
            f'set -o pipefail; tsdoc() {{ "{sys.executable}" -m tsdoc "$@"; }}; {command}',
        ],
        cwd=cwd,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("unbuffered", ["", "PYTHONUNBUFFERED=1 "])
def test_a_closed_pipe_is_silent(tmp_path: Path, unbuffered: str) -> None:
    (tmp_path / "big.txt").write_text("A line of text that is long enough.\n" * 20_000)
    done = shell(f"export {unbuffered}X=; tsdoc text big.txt | head -1", cwd=tmp_path)
    assert done.stderr == ""
    assert done.returncode in (0, 141)
    assert done.stdout.count("\n") == 1


def test_a_closed_pipe_on_both_streams_is_silent(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_text("A line of text that is long enough.\n" * 20_000)
    done = shell("tsdoc text big.txt 2>&1 | head -1", cwd=tmp_path)
    assert (done.stderr, done.returncode in (0, 141)) == ("", True)


def test_help_into_a_closed_pipe_is_silent(tmp_path: Path) -> None:
    done = shell("tsdoc ask --help | true", cwd=tmp_path)
    assert (done.stderr, done.returncode in (0, 141)) == ("", True)


@pytest.mark.parametrize("command", ["config show", "config show --json", "--version"])
def test_an_answer_that_cannot_be_written_is_an_error(tmp_path: Path, command: str) -> None:
    done = shell(f"tsdoc {command} >&-", cwd=tmp_path)
    assert done.returncode == 6
    said = "tsdoc: stdout: the output cannot be written (Bad file descriptor)\n"
    assert done.stderr.endswith(said)
    assert shell(f"tsdoc {command} >&- 2>&-", cwd=tmp_path).returncode == 6


def test_notes_that_cannot_be_written_are_no_error(tmp_path: Path) -> None:
    done = shell("tsdoc config show 2>&-", cwd=tmp_path)
    assert (done.returncode, "answer.seed" in done.stdout, done.stderr) == (0, True, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    done = shell("tsdoc config show > /dev/full", cwd=tmp_path)
    assert done.returncode == 6
    assert done.stderr.splitlines()[-1] == (
        "tsdoc: stdout: the output cannot be written (No space left on device)"
    )


def test_a_pipe_that_does_not_block_loses_nothing(tmp_path: Path) -> None:
    """However slowly it is read."""
    book = tmp_path / "book.txt"
    book.write_text("All of it has to arrive.\n" * 20_000)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    with subprocess.Popen(
        [sys.executable, "-m", "tsdoc", "text", str(book)],
        env=ENVIRONMENT,
        stdout=write_end,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(write_end)
        time.sleep(1.5)  # the pipe is full by now
        with os.fdopen(read_end, "rb") as pipe:
            arrived = pipe.read()
    assert process.returncode == 0
    assert arrived.count(b"All of it has to arrive.") == 20_000


def test_a_pipe_that_does_not_block_is_waited_for() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    with subprocess.Popen(
        [sys.executable, "-m", "tsdoc", "text", "-"],
        env=ENVIRONMENT,
        stdin=read_end,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(read_end)
        with os.fdopen(write_end, "wb") as pipe:
            time.sleep(1.5)  # it is empty, and not at its end
            pipe.write(b"Late, but here.\n")
        arrived, _ = process.communicate()
    assert process.returncode == 0
    assert b"Late, but here." in arrived


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("line", ["text missing.txt 2> /dev/full", "text x --json > /dev/full"])
def test_an_error_that_cannot_be_said_keeps_its_exit_code(tmp_path: Path, line: str) -> None:
    done = shell(f"tsdoc {line}", cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_any_encoding_of_stdout_does(tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "symbols.txt"
    file.write_text("arrow → check ✓ snow ☃ emoji 😀 ligature ﬁ\n", encoding="utf-8")
    for command in (["text"], ["tokens", "--offline"]):
        done = run(*command, str(file), env={"PYTHONIOENCODING": encoding})
        assert done.returncode == 0
        assert "Traceback" not in done.stderr


def test_tokens_of_a_model_that_is_no_file_are_not_estimated(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("Some words.\n")
    done = run("tokens", str(file), "--model", "tiny")
    assert (done.returncode, done.stdout) == (4, "")
    assert "For the profile of that name: --profile tiny." in done.stderr
    estimated = run("tokens", str(file), "--offline")
    assert (estimated.returncode, "≈" in estimated.stdout) == (0, True)


def interrupt_at(
    script: str, *moments: str, how: signal.Signals = signal.SIGINT
) -> tuple[int, str]:
    """Sends `how` when a script says each of `moments`; returns its exit code and stderr."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for moment in moments:
            assert process.stdout.readline() == f"{moment}\n"
            process.send_signal(how)
        try:
            _, stderr = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, stderr


SLOW_COMMAND = """
    import contextlib, sys, time
    from tsdoc.cli.app import main
    from tsdoc.cli.services import Services

    class Slow(Services):
        @contextlib.contextmanager
        def open_session(self, **arguments):
            try:
                print("ready", flush=True)
                time.sleep(600)
                yield
            finally:
                print("closing", flush=True)
                time.sleep({closing})

    main(["ask", "a.txt", "Who?"], services=Slow())
"""


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_first_ctrl_c_or_sigterm_ends_in_good_order(how: signal.Signals) -> None:
    ended = interrupt_at(SLOW_COMMAND.format(closing=0), "ready", how=how)
    assert ended == (130, "tsdoc: stopped\n")


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_second_ctrl_c_or_sigterm_ends_at_once(how: signal.Signals) -> None:
    ended = interrupt_at(SLOW_COMMAND.format(closing=600), "ready", "closing", how=how)
    assert ended == (130, "")


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM"])
def test_ctrl_c_or_sigterm_while_importing_cannot_be_swallowed(how: str) -> None:
    script = f"""
        import os, signal, sys, time
        from tsdoc.__main__ import main

        class Swallowing:
            def find_spec(self, name, path=None, target=None):
                if name == "tsdoc.cli.app":
                    try:
                        os.kill(os.getpid(), signal.{how})
                        time.sleep(5)
                    except KeyboardInterrupt:
                        pass

        sys.meta_path.insert(0, Swallowing())
        sys.argv = ["tsdoc", "--version"]
        main()
    """
    done = run_script(script)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tsdoc: stopped\n")


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize(("how", "ended"), [("SIGINT", "goes on"), ("SIGTERM", "ends")])
def test_no_command_goes_on_after_sigterm(how: str, ended: str) -> None:
    script = f"""
        import os, signal
        from tsdoc.cli.interrupt import Interrupts

        with Interrupts(None) as interrupts:
            try:
                os.kill(os.getpid(), signal.{how})
            except KeyboardInterrupt:
                try:
                    interrupts.forgive()
                    print("goes on")
                except KeyboardInterrupt:
                    print("ends")
    """
    assert run_script(script).stdout == f"{ended}\n"


def test_the_entry_point_imports_nothing_before_it_answers_ctrl_c() -> None:
    script = """
import sys
before = set(sys.modules)
import tsdoc.__main__
print(*sorted(set(sys.modules) - before))
"""
    done = run_script(script)
    assert (done.stdout.split(), done.stderr) == (["tsdoc", "tsdoc.__main__"], "")


def test_ctrl_c_while_importing_is_one_line() -> None:
    script = """
        import sys
        from tsdoc.__main__ import main

        class Interrupting:
            def find_spec(self, name, path=None, target=None):
                if name == "tsdoc.cli.app":
                    raise KeyboardInterrupt

        sys.meta_path.insert(0, Interrupting())
        main()
    """
    done = run_script(script)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "tsdoc: stopped\n")


def test_torch_finds_the_environment_that_suits_it_and_the_users_own_stays() -> None:
    script = (
        "import os, sys\n"
        "from tsdoc.__main__ import SUITED, main\n"
        "sys.argv = ['tsdoc', '--version']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules\n"
        "print(*(os.environ[name] for name in SUITED))\n"
    )
    kept = {name: value for name, value in ENVIRONMENT.items() if name not in SUITED}
    for own, expected in [
        ({}, "PASSIVE 1 0 __all__"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE 1 0 __all__"),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=kept | own,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split("\n")[-2] == expected
