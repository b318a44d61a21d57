from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from tests.prompt.strategies import texts
from tsdoc.prompt.estimate import estimate_tokens


def test_nothing_is_no_tokens() -> None:
    assert estimate_tokens("") == 0


@given(texts.filter(bool))
def test_any_text_is_at_least_one_token(text: str) -> None:
    assert 1 <= estimate_tokens(text) <= 4 * len(text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize(
    ("text", "tokens"),
    # Counted with the vocabulary of Qwen2.5.
    [
        ("The whale swam under the ship and the captain said nothing at all.\n" * 10, 150),
        ("def main(path: str) -> int:\n    return len(path) + 12345\n" * 10, 220),
        ("鲸鱼在船下游泳,船长什么也没说。\n" * 10, 120),
    ],
)
def test_estimates_are_near_the_count(text: str, tokens: int) -> None:
    assert tokens * 0.7 < estimate_tokens(text) < tokens * 1.4


def test_estimating_needs_no_tokenizer_library() -> None:
    import subprocess
    import sys

    script = (
        "import sys, tsdoc.prompt.layout;"
        "loaded = {'tokenizers', 'transformers', 'torch', 'pydantic'} & set(sys.modules);"
        "assert not loaded, loaded"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root)
