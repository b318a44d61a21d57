"""What only POSIX has is imported where it is used, so that the rest runs elsewhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tsdoc

PACKAGE = Path(tsdoc.__file__).parent
POSIX_ONLY = {"fcntl", "grp", "pwd", "readline", "resource", "termios", "tty"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_no_module_needs_posix_to_be_imported(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    names = {
        name.split(".")[0]
        for node in tree.body
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not names & POSIX_ONLY
