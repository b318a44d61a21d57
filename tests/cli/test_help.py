"""Every command has a help text with examples, and the options all commands share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from tests.cli.conftest import Cli
from tsdoc.cli.app import build_app

EXPECTED = {
    "ask", "chat", "summarize", "ingest", "tokens", "text", "profile",
    "models list", "models get", "models use", "profiles list", "profiles show",
    "cache list", "cache show", "cache remove", "cache prune", "cache verify",
    "config show", "eval",
    "cache repair",
}  # fmt: skip


def commands(group: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, TyperCommand]]:
    if isinstance(group, TyperGroup):
        for name, child in group.commands.items():
            yield from commands(child, (*path, name))
    else:
        assert isinstance(group, TyperCommand)
        yield " ".join(path), group


GROUPS = ("cache", "models", "profiles", "config")
ALL = dict(commands(typer.main.get_command(build_app())))


def test_these_are_the_commands() -> None:
    assert set(ALL) == EXPECTED


@pytest.mark.parametrize("name", ALL)
def test_every_command_has_examples_that_parse(name: str) -> None:
    command = ALL[name]
    epilog = command.epilog or ""
    assert command.help
    assert epilog.startswith("Examples")
    lines = [
        line.strip() for line in epilog.splitlines() if re.match(r"(.*\| )?tsdoc ", line.strip())
    ]
    assert lines
    assert all(f"tsdoc {name}" in line for line in lines)
    assert max(map(len, epilog.splitlines())) <= 76


@pytest.mark.parametrize("name", ALL)
def test_every_option_is_explained(name: str) -> None:
    params = ALL[name].params
    assert all(isinstance(param, TyperArgument | TyperOption) and param.help for param in params)
    options = {option for param in params for option in param.opts}
    assert {"--json", "--quiet", "--debug"} <= options


@pytest.mark.parametrize("name", ["", *ALL, *GROUPS])
def test_help_is_shown_at_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], cli: Cli
) -> None:
    assert cli(*name.split(), "--help").code == 0
    text = capsys.readouterr().out
    assert "Usage: tsdoc" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["", *ALL, *GROUPS])
def test_paragraphs_of_help_fill_their_lines(
    name: str,
    width: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli(*name.split(), "--help").code == 0
    before_panels = capsys.readouterr().out.split("╭")[0]
    lines = [line.strip() for line in before_panels.splitlines()]
    for line, following in pairwise(lines):
        if line and following:  # one paragraph
            first_word = following.split()[0]
            assert len(f" {line} {first_word}") >= width, line


@pytest.mark.parametrize("name", ["", *ALL, *GROUPS])
def test_help_shows_no_types_of_python(
    name: str, capsys: pytest.CaptureFixture[str], cli: Cli
) -> None:
    assert cli(*name.split(), "--help").code == 0
    assert not re.findall(r"<(?:bool|str|list\[\w+\]|int|float)>", capsys.readouterr().out)


def test_without_arguments_the_help_is_shown(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    result = cli()
    assert result.code == 2
    assert "Usage: tsdoc" in capsys.readouterr().out
    assert result.stderr == ""


def test_the_version(cli: Cli) -> None:
    assert cli("--version").stdout.startswith("tsdoc ")


def test_help_offers_no_value_that_is_refused(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    cli("chat", "--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "Files or directories. " in shown
    assert "<=1.0]" not in shown  # 0 is no --top-p
    assert cli("chat", "-").code == 2
    for value in ("0", "1.1", "nan"):
        result = cli("ask", "a.txt", "Who?", "--top-p", value)
        assert (result.code, result.stderr.count("answer.top_p does not take")) == (2, 1)
