"""Entry point of the `tsdoc` command and of `python -m tsdoc`.

Until `main` is reached, Ctrl-C belongs to Python, which answers with a traceback. So nothing is
imported here that Python has not imported already when it starts. What is left are its own start
and the script that pip writes, about 30 ms.
"""

import os
import sys

INTERRUPTED = 130

# For torch, which reads them when it is imported: threads that wait sleep, so that they are not in
# the way of those that work, and large blocks of memory come in large pages. Neither torch nor
# pydantic looks through all installed packages for extensions of its own.
SUITED = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "THP_MEM_ALLOC_ENABLE": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "PYDANTIC_DISABLE_PLUGINS": "__all__",
}

# Imports make hundreds of thousands of objects that stay. To look for garbage among them after
# every 700, as Python does, takes longer than anything that is found there is worth.
GARBAGE = (100_000, 20, 20)


def main() -> None:
    """Runs the command line; Ctrl-C and SIGTERM are one line even while it is being imported."""
    try:
        import gc
        import signal

        gc.set_threshold(*GARBAGE)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # What is imported could swallow an exception, as in a callback of the import system.
            signal.signal(signal.SIGINT, _stop)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _stop)
        for name, value in SUITED.items():
            os.environ.setdefault(name, value)
        from tsdoc.cli.app import main as run

        run()
    except KeyboardInterrupt:
        _stop()
    except SystemExit as done:
        if done.code == INTERRUPTED:
            _leave()
        if "torch" in sys.modules and isinstance(done.code, int):
            # To take down all that it made costs half a second, and with ranks on GPUs it waits
            # for graphs and peers. Everything that is to last has been written by now.
            _leave(done.code)
        raise


def _stop(*signal: object) -> None:
    import contextlib

    with contextlib.suppress(OSError):  # it is closed, and there is nobody to tell
        os.write(2, b"tsdoc: stopped\n")
    _leave()


def _leave(code: int = INTERRUPTED) -> None:
    """Ends the process with `code`, at once.

    The interpreter's own way out was seen to end it by SIGINT now and then, when the interrupt had
    come while modules were imported.
    """
    import contextlib

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError, RuntimeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
