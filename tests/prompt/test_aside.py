from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tsdoc.errors import ModelError
from tsdoc.prompt.aside import AsideTokenizer
from tsdoc.prompt.tokenizer import TextTokenizer

TEXTS = ["Who objects?", "naïve 日本 \ud800 <|im_end|></s>", "", " two  spaces\n"]


@pytest.fixture
def aside(tokenizer: TextTokenizer) -> Iterator[AsideTokenizer]:
    made = AsideTokenizer(tokenizer.directory)
    yield made
    made.close()


def _end(tokenizer: AsideTokenizer) -> None:
    assert tokenizer._process is not None
    os.kill(tokenizer._process.pid, signal.SIGKILL)
    tokenizer._process.wait()


def _all(tokenizer: TextTokenizer) -> list[object]:
    """What a question needs of a tokenizer."""
    encoded = tokenizer.encode_list(TEXTS)
    ids = encoded[1][0].tolist()
    return [
        [(ids.tolist(), starts.tolist(), ids.dtype) for ids, starts in encoded],
        tokenizer.encode(TEXTS[1])[0].tolist(),
        [tokenizer.encode_control("<|im_end|>\na</s>", at_start=b).tolist() for b in (False, True)],
        tokenizer.decode(ids),
        tokenizer.fingerprint,
        tokenizer.start_ids.tolist(),
    ]


def test_a_tokenizer_aside_says_what_one_says_here(
    tokenizer: TextTokenizer, aside: AsideTokenizer
) -> None:
    aside.encode("a")
    assert "_loaded" not in vars(aside)
    assert _all(aside) == _all(tokenizer)
    assert aside._process is not None


def test_once_its_process_has_ended_it_goes_on_here(
    tokenizer: TextTokenizer, aside: AsideTokenizer
) -> None:
    aside.encode("a")
    decoder = aside.stream_decoder()
    _end(aside)
    ids = tokenizer.encode("Who objects?")[0].tolist()
    assert "".join(decoder.push(token) for token in ids).strip() == "Who objects?"
    assert _all(aside) == _all(tokenizer)
    assert aside._process is None


def test_a_damaged_tokenizer_is_the_same_error_as_here(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{", "utf-8")
    aside = AsideTokenizer(tmp_path)
    with pytest.raises(ModelError, match="tokenizer cannot be read"):
        aside.encode("a")


def test_a_closed_one_can_still_be_used(tokenizer: TextTokenizer) -> None:
    aside = AsideTokenizer(tokenizer.directory)
    aside.close()
    aside.close()
    assert _all(aside) == _all(tokenizer)
