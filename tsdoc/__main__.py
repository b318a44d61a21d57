"""Entry point of the `tsdoc` command and of `python -m tsdoc`."""

from __future__ import annotations

from tsdoc.cli.app import main

if __name__ == "__main__":
    main()
