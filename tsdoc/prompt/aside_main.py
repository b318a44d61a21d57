"""The tokenizer process: answers what a question needs (see `tsdoc.prompt.aside`)."""

from __future__ import annotations

import os
from pathlib import Path

from tsdoc.errors import ModelError
from tsdoc.ingest.frames import Message, encode_frame, read_frame
from tsdoc.prompt.tokenizer import TextTokenizer


def main(directory: str) -> None:
    """Serves requests about the tokenizer of a model directory until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the frames
    requests = os.fdopen(0, "rb")
    tokenizer = TextTokenizer(Path(directory))
    try:
        tokenizer.load()
        while (request := read_frame(requests)) is not None:
            answers.write(encode_frame(answer(tokenizer, request)))
            answers.flush()
    except ModelError:
        os._exit(1)  # who asks will read the tokenizer, and say what is wrong with it
    os._exit(0)  # there is nothing to be put in order


def answer(tokenizer: TextTokenizer, request: Message) -> Message:
    """Returns the answer to one request."""
    if "texts" in request:
        encoded = tokenizer.encode_many(request["texts"])
        return {"encoded": [(ids.tolist(), starts.tolist()) for ids, starts in encoded]}
    if "control" in request:
        ids = tokenizer.encode_control(request["control"], at_start=request["at_start"])
        return {"ids": ids.tolist()}
    if "spell" in request:
        return {"bytes": tokenizer.token_bytes[request["spell"]].hex()}
    return {"strips_first_space": tokenizer.token_bytes.strips_first_space}
