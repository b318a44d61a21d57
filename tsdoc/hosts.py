"""Entry point under torchrun, on one machine or several: `torchrun … -m tsdoc.hosts ask …`.

Rank 0 runs the command line; all others compute with it and take nothing of their arguments.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Runs the command on rank 0; follows it elsewhere."""
    from tsdoc.cli.console import standard_terminal
    from tsdoc.errors import TsdocError
    from tsdoc.parallel.hosts import dismiss_hosts, follow_hosts, rank_here

    try:
        if rank_here() > 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 ends all
            follow_hosts()
            _leave(0)
    except TsdocError as error:
        standard_terminal().error(error, debug=False)
        _leave(error.exit_code)
    from tsdoc.cli.app import main as run

    try:
        run([*sys.argv[1:], "--set", "parallel.launcher=torchrun"])
    except SystemExit as done:
        dismiss_hosts()
        _leave(done.code if isinstance(done.code, int) else 1)


def _leave(code: int) -> None:
    """Ends the process at once, whatever still connects it with others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
