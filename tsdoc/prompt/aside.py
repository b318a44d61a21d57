"""A tokenizer in a process of its own, for what one question needs of it.

Reading a tokenizer takes a second, in which it holds the interpreter's lock. Importing torch takes
two, and holds it as well. So where both are to be done, another process reads the tokenizer.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tsdoc.ingest.frames import Message, encode_frame, read_frame
from tsdoc.prompt.decoding import Spelling
from tsdoc.prompt.tokenizer import Ids, TextTokenizer

# The same tsdoc as this one, and nothing from the current folder: as for the readers' process.
_START = """
import sys
root = sys.argv[1]
sys.path.insert(0, root)
import tsdoc
sys.path.remove(root)
sys.path.append(root)
from tsdoc.prompt.aside_main import main
main(sys.argv[2])
"""


class AsideTokenizer(TextTokenizer):
    """See `TextTokenizer`: one whose process reads it from now on.

    Once that process does not answer, this one reads the tokenizer too and goes on.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        root = str(Path(__file__).resolve().parents[2])
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, root, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which then ends that one
        )

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def encode_list(self, texts: Sequence[str]) -> list[tuple[Ids, Ids]]:
        """See `TextTokenizer.encode_list`."""
        found = self._ask({"texts": texts})
        if found is None:
            return super().encode_list(texts)
        return [(_ids(ids), _ids(starts)) for ids, starts in found["encoded"]]

    def encode_control(self, text: str, *, at_start: bool = False) -> Ids:
        """See `TextTokenizer.encode_control`."""
        found = self._ask({"control": text, "at_start": at_start})
        if found is None:
            return super().encode_control(text, at_start=at_start)
        return _ids(found["ids"])

    @property
    def token_bytes(self) -> Spelling:
        """See `TextTokenizer.token_bytes`."""
        found = self._ask({})
        if found is None:
            return super().token_bytes
        return _AskedBytes(self, strips_first_space=found["strips_first_space"])

    def spell(self, token: int) -> bytes:
        """Returns the bytes of a token, as `token_bytes` has them."""
        found = self._ask({"spell": token})
        return bytes.fromhex(found["bytes"]) if found is not None else super().token_bytes[token]

    def _ask(self, request: Message) -> Message | None:
        """Returns the process's answer; None where there will be none."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            process.stdin.write(encode_frame(request))
            process.stdin.flush()
            found = read_frame(process.stdout)
        except (OSError, ValueError):  # it ended, before or within its answer
            found = None
        if found is None:
            self.close()
        return found


class _AskedBytes:
    """See `Spelling`: the process is asked for every token."""

    def __init__(self, tokenizer: AsideTokenizer, *, strips_first_space: bool) -> None:
        self._tokenizer = tokenizer
        self.strips_first_space = strips_first_space

    def __getitem__(self, token: int) -> bytes:
        return self._tokenizer.spell(token)


def _ids(numbers: Sequence[int]) -> Ids:
    return np.array(numbers, dtype=np.int32)
