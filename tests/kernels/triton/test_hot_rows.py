"""Decode steps with K and V in host memory: what is kept on the device changes no answer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.triton.cases import make_rope, only_on_gpu
from tests.kernels.triton.test_triton_cache import CONFIG, DIM, KV_HEADS, make_backend, make_pieces
from tsdoc.kernels.hot_rows import HotRows
from tsdoc.kernels.index_use import IndexConfig, IndexWatch
from tsdoc.kernels.triton.hot_rows import find
from tsdoc.kernels.triton_answers import TritonDecode
from tsdoc.kernels.triton_backend import TritonBackend

SMALL = dataclasses.replace(CONFIG, n_local=4, top_k=8)
LENGTH = 300


class Steps:
    """The same answer with K and V on the device and in host memory, whose pages are reversed."""

    def __init__(
        self, device: torch.device, theta: float | None, allowed: list[tuple[int, int]] | None
    ) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(6)
        k, v = (self._random(400, KV_HEADS, DIM) for _ in range(2))
        self.answers: list[tuple[TritonBackend, TritonDecode]] = []
        for on_host in (False, True):
            backend = make_backend(device)
            if on_host:
                backend.pool.move_to_host()
            watch = IndexWatch(IndexConfig(candidates=2))
            cache = backend.cache(make_pieces([400]), make_rope(DIM, device), SMALL, watch)
            backend.pool.place(list(reversed(range(backend.pool.capacity // 256))))
            for layer in range(2):
                cache.write(layer, 0, k + layer, v - layer)
            backend.pool.resident = LENGTH
            decode = cache.start_decode(LENGTH, theta=theta, max_hits=64, allowed=allowed)
            assert decode is not None
            self.answers.append((backend, decode))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self.device) * 2

    def step(self, q: torch.Tensor) -> list[torch.Tensor]:
        """Attends from the next token in both layers; returns what came out of both answers."""
        k, v = (self._random(1, KV_HEADS, DIM) for _ in range(2))
        outputs = []
        for _, decode in self.answers:
            layers = [decode.attend(layer, q + layer, k, v) for layer in range(2)]
            decode.run(lambda ids: ids.float(), 0)  # on to the next position
            outputs.append(torch.stack(layers))
        return outputs

    def query(self) -> torch.Tensor:
        return self._random(1, KV_HEADS * 3, DIM)

    def counts(self) -> dict[str, int]:
        hot = self.answers[1][1]._current().hot
        assert hot is not None
        assert self.answers[0][1]._current().hot is None
        return hot.counts()


@pytest.mark.parametrize("allowed", [None, [(10, 60), (200, 230)]])
def test_steps_attend_to_the_same_rows_wherever_these_lie(
    device: torch.device, allowed: list[tuple[int, int]] | None
) -> None:
    """For longer than the local window, with queries that drift and one that is another."""
    only_on_gpu(device, allowed is not None)
    steps = Steps(device, None, allowed)
    query = steps.query()
    for number in range(6):
        query = steps.query() if number == 3 else query + 0.2 * steps.query()
        resident, hosted = steps.step(query)
        assert torch.equal(resident, hosted)
    counts = steps.counts()
    assert counts["values_wanted"] == 2 * 6 * SMALL.top_k
    assert counts["keys_wanted"] >= 2 * 6 * SMALL.top_k
    assert 0 < counts["values_found"] < counts["values_wanted"]
    assert 0 < counts["keys_found"] < counts["keys_wanted"]


def test_a_query_that_stays_reads_nothing_again(device: torch.device) -> None:
    steps = Steps(device, None, None)
    query = steps.query()
    resident, hosted = steps.step(query)
    before = steps.counts()
    assert before["keys_found"] == before["values_found"] == 0
    resident, hosted = steps.step(query)
    assert torch.equal(resident, hosted)
    counts = steps.counts()
    # What has left the local window meanwhile may be new.
    assert counts["values_found"] >= counts["values_wanted"] - before["values_wanted"] - 4
    assert counts["keys_found"] >= counts["keys_wanted"] - before["keys_wanted"] - 4


def test_hits_leave_what_is_kept_and_the_next_miss_finds_it(device: torch.device) -> None:
    steps = Steps(device, 0.9, None)
    query = steps.query()
    for scale in (0.0, 0.01, 0.5, 0.5):
        resident, hosted = steps.step(query + scale * steps.query())
        assert torch.equal(resident, hosted)
    counts = steps.counts()
    hits = [decode.num_hits for _, decode in steps.answers]
    assert hits[0] == hits[1] > 0
    assert counts["values_wanted"] == (2 * 4 - hits[1]) * SMALL.top_k
    assert counts["keys_found"] > 0


def test_the_next_answer_starts_with_its_own_rows(device: torch.device) -> None:
    steps = Steps(device, None, None)
    steps.step(steps.query())
    for backend, _ in steps.answers:
        keys = backend.pool.keys[0]
        keys += 1.0
    watch = IndexWatch(IndexConfig(candidates=2))
    for number, (backend, old) in enumerate(steps.answers):
        cache = backend.cache(make_pieces([400]), make_rope(DIM, steps.device), SMALL, watch)
        backend.pool.resident = LENGTH
        decode = cache.start_decode(LENGTH, theta=None, max_hits=64, allowed=None)
        assert decode is not None
        assert decode._current() is not old._steps
        steps.answers[number] = (backend, decode)
    resident, hosted = steps.step(steps.query())
    assert torch.equal(resident, hosted)
    assert steps.counts()["keys_found"] == 0


def test_rows_beyond_what_is_kept_are_read_where_they_are(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many equal votes are one more than are wanted; here hardly any candidate is kept."""
    import tsdoc.kernels.triton_decode as module

    monkeypatch.setattr(module, "HotRows", lambda pool, config, _: HotRows(pool, config, 5))
    steps = Steps(device, None, None)
    query = steps.query()
    for _ in range(2):
        resident, hosted = steps.step(query + 0.2 * steps.query())
        assert torch.equal(resident, hosted)
    assert 0 < steps.counts()["keys_found"] <= 2 * 2 * 5


@triton.jit
def _find_kernel(  # type: ignore[no-untyped-def]  # Triton's types are not declared
    list_ptr, wanted_ptr, out_ptr, number, STEPS: tl.constexpr
):
    lanes = tl.arange(0, 256)
    wanted = tl.load(wanted_ptr + lanes)
    tl.store(out_ptr + lanes, find(list_ptr, number, wanted, STEPS))


@pytest.mark.parametrize("size", [1, 2, 7, 8, 100])
def test_finds_places_in_a_list_and_what_is_not_there(device: torch.device, size: int) -> None:
    listed = torch.arange(size, dtype=torch.int32, device=device) * 2 + 1
    wanted = torch.arange(256, dtype=torch.int32, device=device)
    out = torch.empty(256, dtype=torch.int32, device=device)
    for number in (0, size):
        _find_kernel[(1,)](listed, wanted, out, number, STEPS=size.bit_length())
        expected = [(n - 1) // 2 if n % 2 and n < 2 * number else -1 for n in range(256)]
        assert out.tolist() == expected
