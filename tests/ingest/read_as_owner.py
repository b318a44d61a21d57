"""Reads a folder as the user who owns it, and prints what was found: root reads everything.

python -m tests.ingest.read_as_owner FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.ingest.making import read, texts


def main(folder: Path) -> None:
    """Prints a JSON list: what is read by whoever starts this, and then by the owner."""
    found = []
    # Whatever is imported on first use may be out of the owner's reach: root reads first.
    for uid in (os.getuid(), folder.stat().st_uid):
        if uid != os.getuid():
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        document = read(folder)
        unreadable = sorted(w.where for w in document.warnings if w.code == "unreadable")
        found.append({"uid": os.geteuid(), "texts": texts(document), "unreadable": unreadable})
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
