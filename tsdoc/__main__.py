"""Entry point of the `tsdoc` command and of `python -m tsdoc`.

Until `main` is reached, Ctrl-C belongs to Python, which answers with a traceback. So nothing is
imported here that Python has not imported already when it starts. What is left are its own start
and the script that pip writes, about 30 ms.
"""

import os
import sys

INTERRUPTED = 130


def main() -> None:
    """Runs the command line; Ctrl-C is one line even while it is still being imported."""
    try:
        from tsdoc.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("tsdoc: stopped\n")
        _leave()
    except SystemExit as done:
        if done.code == INTERRUPTED:
            _leave()
        raise


def _leave() -> None:
    """Ends the process with 130, at once.

    The interpreter's own way out was seen to end it by SIGINT now and then, when the interrupt had
    come while modules were imported.
    """
    import contextlib

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):
            stream.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
