"""The one check of free memory that prompts, profiles and evaluations ask."""

from __future__ import annotations

import psutil
import pytest

from tsdoc.errors import DiskFullError, ResourceError
from tsdoc.session import memory
from tsdoc.session.memory import ROOM, check_kv_memory
from tsdoc.store.key import KVShape

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=8, kv_dtype="bfloat16")
TOKEN_BYTES = 2 * 2 * 2 * 8 * 2
NUM_TOKENS = 10_000


def free(monkeypatch: pytest.MonkeyPatch, host: int, gpu: int = 0) -> None:
    found = psutil.virtual_memory()._replace(available=host)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(memory, "device_bytes", lambda wanted: gpu)


def test_the_prompt_with_question_and_answer_may_take_four_fifths_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = (NUM_TOKENS + ROOM) * TOKEN_BYTES
    free(monkeypatch, host=needed * 5 // 4)
    check_kv_memory(NUM_TOKENS, SHAPE, "cpu", hint="Read less.")
    with pytest.raises(ResourceError):
        check_kv_memory(NUM_TOKENS + 1, SHAPE, "cpu", hint="Read less.")


def test_a_gpus_memory_counts_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, host=0, gpu=(NUM_TOKENS + ROOM) * TOKEN_BYTES)
    check_kv_memory(NUM_TOKENS, SHAPE, "cuda", hint="Read less.")
    with pytest.raises(ResourceError):
        check_kv_memory(NUM_TOKENS + 1, SHAPE, "cuda", hint="Read less.")


def test_what_is_needed_free_and_to_be_done_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, host=1000)
    with pytest.raises(ResourceError) as caught:
        check_kv_memory(NUM_TOKENS, SHAPE, "cpu", hint="Read less.")
    assert str(caught.value) == (
        "K and V of 10,000 tokens need 1.3 MB of memory, with 1.0 kB free. Read less."
    )


def test_why_they_are_to_be_in_memory_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, host=1000)
    cause = DiskFullError("the disk is full", where="/home/store")
    with pytest.raises(ResourceError, match=r"^/home/store: the disk is full, and K and V of"):
        check_kv_memory(NUM_TOKENS, SHAPE, "cpu", hint="Read less.", cause=cause)
