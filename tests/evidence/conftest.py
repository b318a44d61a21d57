from __future__ import annotations

import pytest

from tests.prompt.vocabularies import make_byte_level
from tsdoc.prompt.tokenizer import TextTokenizer


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(make_byte_level(tmp_path_factory.mktemp("models") / "tiny"))
