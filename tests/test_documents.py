"""README and help name every command and every exit code; JSON is checked in tests/cli."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import tsdoc
from tests.cli.test_help import ALL
from tsdoc.cli.app import EPILOG
from tsdoc.errors import TsdocError

ROOT = Path(tsdoc.__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")


def exit_codes() -> set[int]:
    found, todo = {0, 1}, [TsdocError]
    while todo:
        error = todo.pop()
        found.add(error.exit_code)
        todo += error.__subclasses__()
    return found


@pytest.mark.parametrize("name", ALL)
def test_the_readme_names_every_command(name: str) -> None:
    first, *rest = name.split()
    rows = [line for line in README.splitlines() if line.startswith(f"| `tsdoc {first} ")]
    rows += [line for line in README.splitlines() if line.startswith(f"| `tsdoc {first}` ")]
    assert len(rows) == 1
    assert all(re.search(rf"[` ]{word}`", rows[0]) for word in rest)


def test_the_readme_and_the_help_name_every_exit_code() -> None:
    table = {int(code) for code in re.findall(r"^\| (\d+) \| .+ \|$", README, re.MULTILINE)}
    assert table == exit_codes()
    described = EPILOG[EPILOG.index("Exit codes") :]
    assert {
        int(code) for code in re.findall(r"^ *(\d+)  [a-z]", described, re.MULTILINE)
    } == exit_codes()


def test_the_readme_names_the_schemas() -> None:
    assert "tsdoc/cli/SCHEMAS.md" in README
    assert (Path(tsdoc.__file__).parent / "cli" / "SCHEMAS.md").exists()


def test_the_readme_installs_the_torch_that_the_package_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (wanted,) = [name for name in project["dependencies"] if re.match(r"torch\b", name)]
    install = README.index("## Install and ask")
    line = README.index(f'pip install "{wanted}" --index-url ', install)
    assert line < README.index("pip install . ", install)  # or CUDA's libraries are there already
