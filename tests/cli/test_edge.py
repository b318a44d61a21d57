"""Every error ends as an exit code and one line, or one JSON object."""

from __future__ import annotations

import errno

import pytest

from tests.cli.conftest import Cli, FakeServices
from tsdoc import errors
from tsdoc.progress import Reporter


def fail_with(services: FakeServices, error: BaseException) -> None:
    def fail(reporter: Reporter) -> None:
        raise error

    services.before_answer = fail


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError("wrong"), 2),
        (errors.InputError("wrong"), 3),
        (errors.ModelError("wrong"), 4),
        (errors.StoreError("wrong"), 5),
        (errors.CorruptPageError("wrong", where="here", start=0, end=1), 5),
        (errors.ResourceError("wrong"), 6),
        (errors.PartialInputError("wrong"), 7),
        (errors.InterruptedRunError("wrong"), 130),
        (errors.TsdocError("wrong"), 1),
        (MemoryError(), 6),
        (OSError(errno.EMFILE, "Too many open files"), 6),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 6),
        (RuntimeError("unable to mmap 9 bytes from file <w>: Cannot allocate memory (12)"), 6),
        (OSError(errno.EIO, "Input/output error"), 1),
        (KeyError("wrong"), 1),
    ],
)
def test_exit_code_of_every_error(
    cli: Cli, services: FakeServices, error: BaseException, code: int
) -> None:
    fail_with(services, error)
    result = cli("ask", "a.txt", "Who?", "--quiet")
    assert (result.code, result.stdout) == (code, "")
    assert result.stderr.splitlines()[-1].startswith("tsdoc: ")
    assert "Traceback" not in result.stderr


def test_every_error_class_has_its_exit_code_tested() -> None:
    def below(kind: type[errors.TsdocError]) -> set[type[errors.TsdocError]]:
        return {kind}.union(*(below(child) for child in kind.__subclasses__()))

    codes = {kind.exit_code for kind in below(errors.TsdocError)}
    assert codes == {1, 2, 3, 4, 5, 6, 7, 130}


def test_an_error_line_says_where_what_and_what_next(cli: Cli, services: FakeServices) -> None:
    fail_with(services, errors.InputError("is empty", where="a.txt", hint="Give\nanother."))
    result = cli("ask", "a.txt", "Who?", "--quiet")
    assert result.stderr.splitlines()[-1] == "tsdoc: a.txt: is empty. Give another."


def test_what_ends_as_a_question_gets_no_second_mark(cli: Cli) -> None:
    said = cli("aks", "a.txt", "Who?").stderr
    assert "Did you mean 'ask'? `tsdoc --help`" in said


def test_an_error_as_json(cli: Cli, services: FakeServices) -> None:
    fail_with(services, errors.InputError("is empty", where="a.txt", hint="Give another."))
    result = cli("ask", "a.txt", "Who?", "--json")
    assert result.code == 3
    assert result.json() == {
        "schema": "tsdoc.ask/1",
        "error": {
            "code": "input",
            "message": "is empty",
            "where": "a.txt",
            "hint": "Give another.",
        },
    }


def test_an_unforeseen_error_points_to_debug(cli: Cli, services: FakeServices) -> None:
    fail_with(services, KeyError("key"))
    result = cli("ask", "a.txt", "Who?", "--json")
    assert "--debug" in result.stderr
    assert result.json()["error"]["code"] == "internal"


def test_debug_shows_the_traceback(cli: Cli, services: FakeServices) -> None:
    fail_with(services, errors.InputError("is empty"))
    result = cli("ask", "a.txt", "Who?", "--debug")
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("tsdoc: is empty\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("ask", "--nonsense"), "No such option: --nonsense"),
        (("ask", "a", "b", "--seed", "x"), "seed"),
        (("aks",), "No such command 'aks'. Did you mean 'ask'"),
        (("config", "shwo"), "No such command 'shwo'"),
        (("ask", "a", "b", "--device", "tpu"), "device"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_2(
    cli: Cli, args: tuple[str, ...], message: str
) -> None:
    result = cli(*args)
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.startswith("tsdoc: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert "--help` shows what it takes" in result.stderr


def test_wrong_arguments_as_json(cli: Cli) -> None:
    result = cli("ask", "--json", "--nonsense")
    assert result.code == 2
    value = result.json()
    assert value["schema"] == "tsdoc.ask/1"
    assert value["error"]["code"] == "usage"
    assert cli("config", "shwo", "--json").json()["schema"] == "tsdoc.config/1"


def test_json_after_a_double_dash_is_a_question(cli: Cli, services: FakeServices) -> None:
    result = cli("ask", "a.txt", "--", "--json")
    assert result.stdout == "The villain is Moriarty.\n"
    assert services.sessions[0].asked == ["--json"]


def test_hostile_text_in_an_error_is_made_visible(cli: Cli, services: FakeServices) -> None:
    fail_with(services, errors.InputError("bad", where="\x1b]0;x\x07[red]\u202e.txt"))
    result = cli("ask", "a.txt", "Who?", "--quiet")
    assert result.stderr.splitlines()[-1] == "tsdoc: \\x1b]0;x\\x07[red]\\u202e.txt: bad"


@pytest.mark.parametrize("option", ["--compare", "--sweep"])
def test_a_choice_that_there_is_not_is_refused_in_plain_words(cli: Cli, option: str) -> None:
    result = cli("profile", option, "half")
    assert result.code == 2
    assert f"Invalid value for '{option}': 'half' is not one of " in result.stderr


def test_a_reader_that_leaves_while_typer_prints_is_no_error(
    cli: Cli, services: FakeServices
) -> None:
    fail_with(services, BrokenPipeError(32, "Broken pipe"))
    result = cli("ask", "a.txt", "Who?", "--quiet")
    assert (result.code, result.stdout) == (141, "")
    assert "error" not in result.stderr


def test_ctrl_c_that_a_library_makes_another_error_of_is_ctrl_c(
    cli: Cli, services: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsdoc.cli.interrupt.Interrupts.came", True)
    fail_with(services, ValueError("could not determine the shape"))
    result = cli("ask", "a.txt", "Who?", "--quiet")
    assert result.code == 130
    assert result.stderr.splitlines()[-1].startswith("tsdoc: stopped")
