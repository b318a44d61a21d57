"""Keys of most attention by the kernels against dense arithmetic."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.cases import PAGE
from tsdoc.kernels.most_attended import Choice, by_kernels, by_torch, most_attended

Place = tuple[torch.device, torch.dtype]
HEADS, KV, DIM = 6, 2, 64


def make_inputs(
    place: Place, num_tokens: int, num_keys: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys with NaN behind the last that is written, and what lies nearer."""
    device, dtype = place
    generator = torch.Generator().manual_seed(num_tokens + num_keys)
    q = torch.randn(num_tokens, HEADS, DIM, generator=generator)
    keys = torch.full((-(-num_keys // PAGE) * PAGE, KV, DIM), torch.nan)
    keys[:num_keys] = torch.randn(num_keys, KV, DIM, generator=generator)
    nearer = 6 * torch.randn(num_tokens, HEADS, generator=generator)
    return q.to(device, dtype), keys.to(device, dtype), nearer.to(device)


def overlap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of the expected positions that were found, of all sets together."""
    pairs = zip(found.flatten(0, 1).tolist(), expected.flatten(0, 1).tolist(), strict=True)
    hits = [len(set(a) & set(b)) for a, b in pairs]
    return sum(hits) / expected.numel()


@pytest.mark.parametrize("share", [1, 4])
@pytest.mark.parametrize("first_end", [90, 256, 500])
def test_kernels_find_what_dense_arithmetic_finds(place: Place, share: int, first_end: int) -> None:
    num_sets = 5
    choice = Choice(first=8, ends=range(first_end, first_end + num_sets * share, share), count=24)
    q, keys, nearer = make_inputs(place, num_sets * share, choice.ends[-1] + 3)
    found, expected = by_kernels(q, keys, nearer, choice), by_torch(q, keys, nearer, choice)
    assert found.shape == expected.shape == (KV, num_sets, 24)
    if place[1] == torch.float32:
        assert torch.equal(found, expected)
    else:  # scaled queries are rounded once more: what is about equal may change places
        assert overlap(found, expected) > 0.95


def test_what_lies_nearer_takes_its_part_of_a_head(device: torch.device) -> None:
    """A head that looks elsewhere has less say in what the heads of its group choose."""
    q = torch.zeros(1, 2, DIM)
    q[0, 0, 0], q[0, 1, 1] = 40.0, 40.0
    keys = torch.zeros(PAGE, 1, DIM)
    keys[10, 0, 0], keys[20, 0, 1] = 1.0, 1.0
    choice = Choice(first=0, ends=[200], count=1)
    for nearer, best in ((torch.tensor([[-50.0, 50.0]]), 10), (torch.tensor([[50.0, -50.0]]), 20)):
        for find in (by_torch, by_kernels):
            found = find(q.to(device), keys.to(device), nearer.to(device), choice)
            assert found.item() == best


def test_many_sets_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Choice(first=4, ends=range(60, 90, 3), count=7)
    q, keys, nearer = make_inputs((torch.device("cpu"), torch.float32), 30, 90)
    whole = most_attended(q, keys, nearer, choice)
    monkeypatch.setattr("tsdoc.kernels.most_attended.SCORE_BYTES", 4 * HEADS * 3 * 90 * 3)
    assert torch.equal(most_attended(q, keys, nearer, choice), whole)
