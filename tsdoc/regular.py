"""Opening files that others name: a pipe or a device there would be waited for without end."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

OWN_LIMIT = 256 << 20


class NotRegularError(OSError):
    """A pipe, a socket or a device stands where a file is needed."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "not a regular file", str(path))


def open_regular(path: Path, *, follow: bool = True) -> BufferedReader:
    """Opens a regular file for reading, without ever waiting for one that is none.

    Args:
        path: The file.
        follow: Whether it may be a link.

    Raises:
        NotRegularError: it is a pipe, a socket or a device.
        OSError: it cannot be opened, or is a directory.
        ValueError: no path can be like that.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # what a socket says
            raise NotRegularError(path) from error
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise NotRegularError(path)
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_own(path: Path) -> bytes:
    """Returns the content of a small file that tsdoc keeps for itself; links are not followed.

    Raises:
        OSError: there is none, it cannot be read, or it is nothing that tsdoc wrote: a link, a
            pipe, a device, or larger than any such file.
    """
    with open_regular(path, follow=False) as file:
        data = file.read(OWN_LIMIT + 1)
    if len(data) > OWN_LIMIT:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return data
