from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.prompt.vocabularies import make_byte_level, make_llama3, make_sentencepiece
from tsdoc.prompt.tokenizer import TextTokenizer

_MAKERS: dict[str, Callable[[Path], Path]] = {
    "byte_level": make_byte_level,
    "llama3": make_llama3,
    "sentencepiece": make_sentencepiece,
}


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextTokenizer]:
    root = tmp_path_factory.mktemp("models")
    return {name: TextTokenizer(make(root / name)) for name, make in _MAKERS.items()}


@pytest.fixture(params=list(_MAKERS))
def tokenizer(
    request: pytest.FixtureRequest, tokenizers: dict[str, TextTokenizer]
) -> TextTokenizer:
    return tokenizers[request.param]


@pytest.fixture
def byte_level(tokenizers: dict[str, TextTokenizer]) -> TextTokenizer:
    return tokenizers["byte_level"]


@pytest.fixture
def llama3(tokenizers: dict[str, TextTokenizer]) -> TextTokenizer:
    return tokenizers["llama3"]


@pytest.fixture
def sentencepiece(tokenizers: dict[str, TextTokenizer]) -> TextTokenizer:
    return tokenizers["sentencepiece"]
