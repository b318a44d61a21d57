from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.synthetic import (
    BLOCK,
    KEY,
    SHAPE,
    build,
    expected,
    make_ids,
    make_key,
    prefill,
    read,
)
from tsdoc.store import KVShape, Store


def test_what_was_written_is_read_back_by_another_store(store: Store, root: Path) -> None:
    ids = make_ids(1300)
    entry, reused = build(store, ids, name="a book", meta={"sources": ["a.txt"]})
    assert reused == 0
    assert np.array_equal(read(entry), expected(ids))
    again = Store(root).open(KEY, ids)
    assert again is not None
    assert np.array_equal(read(again), expected(ids))
    assert np.array_equal(again.ids, ids)
    assert (again.name, again.num_tokens, again.meta) == ("a book", 1300, {"sources": ["a.txt"]})


def test_arrays_have_the_shape_of_the_protocol_and_readers_cannot_write(store: Store) -> None:
    entry, _ = build(store, make_ids(700))
    keys = entry.pieces[0].keys(1)
    assert keys.shape == (700, 2, 4)
    assert keys.dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        keys[0] = 1


def test_an_empty_store_has_nothing_and_is_not_created_by_looking(store: Store, root: Path) -> None:
    match = store.find(KEY, make_ids(10))
    assert (match.reused_tokens, match.complete) == (0, False)
    assert store.open(KEY, make_ids(10)) is None
    assert store.list() == []
    assert store.prune(0) == ([], 0)
    assert not root.exists()


def test_a_finished_entry_is_found_complete_with_its_partial_last_chunk(store: Store) -> None:
    ids = make_ids(777)
    build(store, ids)
    match = store.find(KEY, ids)
    assert (match.reused_tokens, match.complete) == (777, True)
    with store.begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="doc") as writer:
        assert (writer.num_committed, writer.complete) == (777, True)
        assert np.array_equal(read(writer), expected(ids))
        entry = writer.finish()
    assert np.array_equal(read(entry), expected(ids))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"rope": {"rope_type": "yarn", "theta": 10_000, "factor": 4}},
        {"n_local": 256},
        {"top_k": 64},
        {"n_init": 4},
        {"chunk_size": 256},
        {"function": "topk"},
        {"sets": "per_kv_head"},
        {"smoothing": 3},
        {"compute_dtype": "bfloat16"},
        {"index": "other"},
        {"layout": 99},
    ],
)
def test_nothing_is_reused_under_another_model_key(store: Store, change: dict[str, object]) -> None:
    ids = make_ids(600)
    build(store, ids)
    assert store.find(make_key(**change), ids).reused_tokens == 0
    assert store.open(make_key(**change), ids) is None


def test_files_are_private_to_the_user(store: Store, root: Path) -> None:
    build(store, make_ids(600))
    for path in [root, *root.rglob("*")]:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_kv_bin_is_reserved_in_full_before_it_is_written(store: Store, root: Path) -> None:
    ids = make_ids(3000)
    with store.begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="doc"):
        info = next(root.rglob("kv.bin")).stat()
        assert info.st_blocks * 512 >= info.st_size >= 3000 * 2 * SHAPE.num_layers * 16


def test_regions_begin_on_memory_pages(store: Store) -> None:
    entry, _ = build(store, make_ids(700))
    first, second = (entry.pieces[0].rows(layer).ctypes.data for layer in range(2))
    assert (second - first) % 4096 == 0


def test_a_block_must_end_where_blocks_end(store: Store) -> None:
    ids = make_ids(1000)
    with store.begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="doc") as writer:
        for end in (0, 100, 300, 1001):
            with pytest.raises(ValueError, match="end"):
                writer.commit(end)
        with pytest.raises(ValueError, match="0 of 1000"):
            writer.finish()


def test_prefill_block_must_hold_whole_chunks_and_pages(store: Store) -> None:
    with pytest.raises(ValueError, match="prefill_block"):
        store.begin(KEY, SHAPE, make_ids(10), prefill_block=384, name="doc")


def test_the_type_of_the_shape_must_be_that_of_the_key(store: Store) -> None:
    shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=4, kv_dtype="float32")
    with pytest.raises(ValueError, match="kv_dtype"):
        store.begin(KEY, shape, make_ids(10), prefill_block=BLOCK, name="doc")


@pytest.mark.parametrize("ids", [[], [[1]], [1.5], [2**31]])
def test_impossible_ids_are_refused(store: Store, ids: list[object]) -> None:
    with pytest.raises(ValueError, match="ids"):
        store.find(KEY, np.array(ids))


@settings(max_examples=20, deadline=None)
@given(
    num_tokens=st.integers(1, 1500),
    chunk=st.sampled_from([64, 128, 256, 512]),
    blocks=st.integers(1, 3),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 8, 10]),
    kv_dtype=st.sampled_from(["bfloat16", "float32"]),
    cut=st.integers(0, 6),
)
def test_any_shape_round_trips_also_when_resumed_with_another_block_size(
    num_tokens: int,
    chunk: int,
    blocks: int,
    layers: int,
    heads: int,
    head_dim: int,
    kv_dtype: str,
    cut: int,
) -> None:
    shape = KVShape(num_layers=layers, num_kv_heads=heads, head_dim=head_dim, kv_dtype=kv_dtype)
    key = make_key(chunk_size=chunk, kv_dtype=kv_dtype)
    ids = make_ids(num_tokens, seed=num_tokens)
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory) / "s", max_bytes=1 << 30)
        with store.begin(key, shape, ids, prefill_block=512, name="x") as writer:
            prefill(writer, ids, shape, 512, stop=min(num_tokens, cut * 512))
            committed = writer.num_committed
        assert store.find(key, ids).reused_tokens == committed
        entry, reused = build(store, ids, key, shape, 512 * blocks)
        assert reused == committed
        with entry:
            assert np.array_equal(read(entry, shape), expected(ids, shape))
