"""A directory that this user may only read, for tests that run as root as well."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def make_read_only(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Has everything that writes below `root` fail as on a file system mounted read-only.

    As there, removing what does not exist fails with EROFS, and making what exists with EEXIST.
    """

    def refuse(path: object, *, unless_exists: bool = False) -> None:
        if not isinstance(path, str | os.PathLike) or not Path(path).is_relative_to(root):
            return
        if not (unless_exists and os.path.lexists(path)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def refusing(
        function: Callable[..., Any], *, unless_exists: bool = False
    ) -> Callable[..., Any]:
        def call(path: object, *args: Any, **kwargs: Any) -> Any:
            refuse(path, unless_exists=unless_exists)
            return function(path, *args, **kwargs)

        return call

    opened = os.open

    def open_it(path: object, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            refuse(path)
        elif flags & os.O_CREAT:
            refuse(path, unless_exists=True)
        return opened(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_it)
    monkeypatch.setattr(os, "mkdir", refusing(os.mkdir, unless_exists=True))
    for name in ("unlink", "rmdir", "rename", "replace", "utime", "chmod"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
