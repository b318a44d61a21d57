"""Pages' checksums where they have arrived: those of the library that the store uses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from tests.kernels.triton.cases import make_rope
from tests.kernels.triton.test_triton_cache import CONFIG, DIM, KV_HEADS, make_backend
from tests.store.synthetic import make_ids, make_key, prefill
from tsdoc.errors import CorruptPageError
from tsdoc.kernels.transfer import Transfer
from tsdoc.kernels.triton.page_digest import can_digest, digests, page_sums
from tsdoc.kernels.triton_backend import TritonBackend
from tsdoc.store import Entry, KVShape, Store

PAGE = 256
SHAPE = KVShape(num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, kv_dtype="float32")
KEY = make_key(kv_dtype="float32")
NUM_TOKENS = 1900


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [
        (4, 128, torch.bfloat16), (3, 64, torch.bfloat16), (1, 80, torch.bfloat16),
        (2, 16, torch.float32), (1, 4, torch.bfloat16),
    ],
)  # fmt: skip
def test_digests_are_xxh3_of_each_page(
    device: torch.device, heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Wherever in the pool it lies: of each token's K, followed by its V."""
    row_bytes = heads * head_dim * dtype.itemsize
    raw = np.random.default_rng(heads).integers(0, 256, (2, 4 * PAGE, row_bytes), dtype=np.uint8)
    keys, values = (
        torch.from_numpy(side.reshape(-1)).view(dtype).view(-1, heads, head_dim).to(device)
        for side in raw
    )
    table = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=device)
    pages = torch.tensor([1, 0, 3], dtype=torch.int32, device=device)
    sums = page_sums(keys, values, table, pages).cpu().numpy()
    slots = [int(table[page]) * PAGE for page in pages]
    wanted = [raw[:, at : at + PAGE].swapaxes(0, 1).tobytes() for at in slots]
    assert digests(sums, 2 * PAGE * row_bytes).tolist() == [
        xxhash.xxh3_64_intdigest(page) for page in wanted
    ]


def test_rows_of_broken_words_are_left_to_the_host(device: torch.device) -> None:
    assert can_digest(torch.empty(PAGE, 1, 4, dtype=torch.bfloat16, device=device))
    assert not can_digest(torch.empty(PAGE, 1, 2, dtype=torch.bfloat16, device=device))


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    store, ids = Store(tmp_path / "store"), make_ids(NUM_TOKENS)
    with store.begin(KEY, SHAPE, ids, prefill_block=512, name="doc") as writer:
        prefill(writer, ids, SHAPE)
        writer.finish()
    found = store.open(KEY, ids)
    assert found is not None
    return found


def begin(entry: Entry, device: torch.device) -> tuple[TritonBackend, Transfer]:
    backend = make_backend(device)
    backend.cache(entry.pieces, make_rope(DIM, device), CONFIG)
    backend.pool.place(list(reversed(range(backend.pool.capacity // PAGE))))
    return backend, Transfer(backend.pool, device, checks_there=True)


def test_what_has_arrived_is_checked_there_and_nowhere_else(
    device: torch.device, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsdoc.store.pages.Segment.read_page", None)
    (segment,) = entry.segments
    backend, transfer = begin(entry, device)
    with entry:
        transfer.load(entry.pieces, 512)
        assert segment.verified[:, :2].all()
        transfer.load(entry.pieces, NUM_TOKENS - NUM_TOKENS % PAGE)
        assert segment.verified[:, :-1].all()
        slots = [int(backend.pool.page_table[at // PAGE]) * PAGE + at % PAGE for at in (0, 1500)]
        rows = backend.pool.values[1][slots].cpu().numpy()
        assert np.array_equal(rows, segment.rows(1)[[0, 1500], 1])


@pytest.mark.parametrize("token", [0, 1100, NUM_TOKENS - 1])
def test_a_damaged_page_is_named_and_what_came_before_stays(
    device: torch.device, entry: Entry, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsdoc.kernels.transfer.LOAD_TOKENS", 512)
    (segment,) = entry.segments
    offset, _ = segment.info.place(1, token, token)
    with segment.path.open("r+b") as file:
        file.seek(offset)
        (old,) = file.read(1)
        file.seek(offset)
        file.write(bytes([old ^ 4]))
    backend, transfer = begin(entry, device)
    with entry, pytest.raises(CorruptPageError, match=f"page {token // PAGE} of layer 1") as caught:
        transfer.load(entry.pieces, NUM_TOKENS)
    assert caught.value.start <= token < caught.value.end
    assert backend.pool.resident == token // 512 * 512


def test_what_changed_on_its_way_is_not_used(
    device: torch.device, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is as it was committed; what arrived is not."""
    sums = page_sums

    def changed(
        keys: torch.Tensor, values: torch.Tensor, page_table: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        values[int(page_table[3]) * PAGE + 100] += 1.0
        return sums(keys, values, page_table, pages)

    backend, transfer = begin(entry, device)
    transfer.wait_ready()
    monkeypatch.setattr("tsdoc.kernels.transfer.page_sums", changed)
    with entry, pytest.raises(CorruptPageError, match="does not match"):
        transfer.load(entry.pieces, NUM_TOKENS)
    assert backend.pool.resident == 0


@pytest.mark.parametrize("task_tokens", [512, 65_536])
def test_pages_that_lie_in_order_travel_together_whatever_of_them_is_known(
    device: torch.device, entry: Entry, task_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsdoc.kernels.transfer.TASK_TOKENS", task_tokens)
    (segment,), (piece,) = entry.segments, entry.pieces
    backend = make_backend(device)
    backend.cache(entry.pieces, make_rope(DIM, device), CONFIG)
    transfer = Transfer(backend.pool, device, checks_there=True)
    with entry:
        piece.check_rows(0, np.array([600, 1100]))
        transfer.load(entry.pieces, 300)  # what follows begins inside a page
        transfer.load(entry.pieces, NUM_TOKENS)
        assert segment.verified.all()
        for layer in range(SHAPE.num_layers):
            keys, values = backend.pool.keys[layer], backend.pool.values[layer]
            assert np.array_equal(keys[:NUM_TOKENS].cpu().numpy(), piece.keys(layer))
            assert np.array_equal(values[:NUM_TOKENS].cpu().numpy(), piece.values(layer))
