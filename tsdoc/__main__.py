"""Entry point of the `tsdoc` command and of `python -m tsdoc`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; Ctrl-C is one line even while it is still being imported."""
    try:
        from tsdoc.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("tsdoc: stopped\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
