from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.store.synthetic import (
    BLOCK,
    KEY,
    SHAPE,
    build,
    expected,
    make_ids,
    prefill,
    read,
    reopen,
)
from tsdoc.store import Store
from tsdoc.store.key import Ids


def joined(*parts: Ids) -> Ids:
    return np.concatenate(parts)


@pytest.mark.parametrize(
    ("common", "reused"), [(0, 0), (127, 0), (128, 128), (700, 640), (1024, 1024), (1300, 1280)]
)
def test_a_changed_document_reuses_whole_chunks_of_the_common_prefix(
    store: Store, common: int, reused: int
) -> None:
    first = make_ids(1300)
    second = joined(first[:common], make_ids(900, seed=9))
    build(store, first)
    assert store.find(KEY, second).reused_tokens == reused
    entry, computed_from = build(store, second)
    assert computed_from == reused
    assert np.array_equal(read(entry), expected(second))


@pytest.mark.parametrize(("length", "reused"), [(640, 640), (700, 640), (128, 128), (1, 0)])
def test_a_shortened_document_reuses_no_token_behind_its_end(
    store: Store, length: int, reused: int
) -> None:
    ids = make_ids(1300)
    build(store, ids)
    entry, computed_from = build(store, ids[:length])
    assert computed_from == reused
    assert np.array_equal(read(entry), expected(ids[:length]))
    assert np.array_equal(entry.ids, ids[:length])


def test_a_prefix_of_whole_chunks_needs_no_segment_of_its_own(store: Store, root: Path) -> None:
    ids = make_ids(1300)
    build(store, ids)
    entry, _ = build(store, ids[:1024])
    assert len(list(root.rglob("kv.bin"))) == 1
    assert np.array_equal(read(entry), expected(ids[:1024]))
    assert store.open(KEY, ids[:1024]) is not None


def test_chains_grow_over_several_documents(store: Store, root: Path) -> None:
    ids = make_ids(200)
    for step in range(6):
        ids = joined(ids, make_ids(300 + 50 * step, seed=step))
        entry, reused = build(store, ids)
        assert np.array_equal(read(entry), expected(ids))
        assert step == 0 or reused == (len(ids) - 300 - 50 * step) // 128 * 128
        entry.close()
    assert len(entry.parts) == 6
    assert np.array_equal(read(reopen(Store(root), ids)), expected(ids))


def test_a_branch_leaves_the_chain_in_the_middle_of_a_parents_page(store: Store) -> None:
    """Chunks are smaller than pages here: the parent's page is checked as a whole."""
    first = make_ids(1300)
    second = joined(first[:640], make_ids(700, seed=1))  # 640 is no multiple of 256
    build(store, first)
    entry, reused = build(store, second)
    assert reused == 640
    assert entry.pieces[0].capacity == 640
    assert entry.pieces[1].start == 640
    assert np.array_equal(read(entry), expected(second))


def test_committed_blocks_of_an_unfinished_document_are_reused(store: Store) -> None:
    first = make_ids(3000)
    with store.begin(KEY, SHAPE, first, prefill_block=BLOCK, name="doc") as writer:
        prefill(writer, first, stop=1024)
        second = joined(first[:2000], make_ids(10, seed=3))
        entry, reused = build(store, second)
        assert reused == 1024
        prefill(writer, first)
        writer.finish()
    assert np.array_equal(read(entry), expected(second))


def test_a_longer_prefix_that_appeared_meanwhile_replaces_an_unfinished_start(
    store: Store, root: Path
) -> None:
    first = make_ids(3000)
    with store.begin(KEY, SHAPE, first, prefill_block=BLOCK, name="doc") as writer:
        assert writer.num_committed == 0
    build(store, joined(first[:2000], make_ids(5, seed=3)))
    entry, reused = build(store, first)
    assert reused == 1920
    assert np.array_equal(read(entry), expected(first))
    assert len(list(root.rglob("kv.bin"))) == 2


def test_equal_hashes_are_not_believed(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hash that always collides, other tokens are still not served."""
    monkeypatch.setattr("tsdoc.store.lookup.entry_id", lambda key, ids: "0" * 32)
    monkeypatch.setattr(
        "tsdoc.store.lookup.chunk_hashes",
        lambda key, ids: np.ones((len(ids) // key.chunk_size, 2), np.uint64),
    )
    build(store, make_ids(600, seed=1))
    assert store.find(KEY, make_ids(600, seed=2)).reused_tokens == 0
    assert store.open(KEY, make_ids(600, seed=2)) is None
    entry, reused = build(store, make_ids(600, seed=2))
    assert reused == 0
    assert np.array_equal(read(entry), expected(make_ids(600, seed=2)))


def test_a_lost_manifest_is_made_again_without_computing(store: Store, root: Path) -> None:
    ids = make_ids(1300)
    build(store, ids)
    next(root.rglob("manifest.json")).unlink()
    assert [e.status for e in store.list()] == ["orphan"]
    entry, reused = build(store, ids)
    assert reused == 1300
    assert np.array_equal(read(entry), expected(ids))
    assert [e.status for e in store.list()] == ["complete"]


def test_a_lost_entry_directory_and_model_file_are_made_again(store: Store, root: Path) -> None:
    ids = make_ids(1300)
    build(store, ids)[0].close()
    for path in list(root.rglob("manifest.json")):
        for child in path.parent.iterdir():
            child.unlink()
        path.parent.rmdir()
    next(root.rglob("model.json")).unlink()
    assert build(store, ids)[1] == 1300
    assert json.loads(next(root.rglob("model.json")).read_text())["fields"]["model"] == "m"
