from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from tests.store.conftest import Warnings
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
    reopen,
)
from tsdoc.errors import ResourceError, StoreError
from tsdoc.store import KVShape, Store
from tsdoc.store.key import Ids


def full(*args: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_an_error_with_numbers_and_leaves_no_litter(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(store, make_ids(500))[0].close()
    before = sorted(root.rglob("*"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match=r"need 131\.1 kB of disk and [0-9.]+ GB are free"):
        build(store, make_ids(2000, seed=1))
    assert sorted(root.rglob("*")) == before
    monkeypatch.undo()
    assert build(store, make_ids(2000, seed=1))[1] == 0


def test_too_little_space_is_known_before_anything_is_reserved(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsdoc.store.files.free_bytes", lambda path: 1000)
    with pytest.raises(ResourceError, match=r"1\.0 kB are free"):
        build(store, make_ids(2000))


def test_without_fallocate_zeros_are_written(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    ids = make_ids(2000)
    with store.begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="doc"):
        info = next(root.rglob("kv.bin")).stat()
        assert info.st_blocks * 512 >= info.st_size == 131_072


def test_a_file_system_without_fallocate_gets_zeros(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*args: object) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    entry, _ = build(store, make_ids(700))
    assert np.array_equal(read(entry), expected(make_ids(700)))


def test_a_disk_that_fills_up_while_committing_loses_only_that_block(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = make_ids(2000)
    with store.begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="doc") as writer:
        prefill(writer, ids, stop=1024)
        with monkeypatch.context() as patches:
            patches.setattr(os, "pwrite", full)
            with pytest.raises(ResourceError, match="the disk is full"):
                prefill(writer, ids)
        assert writer.num_committed == 1024
        assert store.find(KEY, ids).reused_tokens == 1024
        prefill(writer, ids)
        entry = writer.finish()
    assert np.array_equal(read(entry), expected(ids))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this user may mount one."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M,mode=0700", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_really_full_disk_keeps_what_it_has(small_disk: Path) -> None:
    store = Store(small_disk / "store", max_bytes=1 << 40)
    first = make_ids(4000)
    build(store, first)[0].close()
    with pytest.raises(ResourceError, match="are free"):
        build(store, make_ids(20_000, seed=1))
    with reopen(store, first) as entry:
        assert np.array_equal(read(entry), expected(first))
    assert len(store.list()) == 1


def test_a_disk_too_full_for_anything_is_an_error_too(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes((1 << 20) - 4096))
    store = Store(small_disk / "store")
    with pytest.raises(ResourceError, match="the disk is full"):
        build(store, make_ids(500))


@pytest.fixture
def read_only(store: Store, root: Path) -> Iterator[Ids]:
    """A finished entry in a store that cannot be changed."""
    ids = make_ids(1300)
    build(store, ids)[0].close()
    with store.begin(KEY, SHAPE, make_ids(1300, seed=1), prefill_block=BLOCK, name="b") as writer:
        prefill(writer, writer.ids, stop=512)
    if os.getuid() == 0:
        bind = ["mount", "--bind", str(root), str(root)]
        if subprocess.run(bind, capture_output=True).returncode:
            pytest.skip("root, but not allowed to mount")
        subprocess.run(["mount", "-o", "remount,bind,ro", str(root)], check=True)
        yield ids
        subprocess.run(["umount", "-l", str(root)], check=True)
    else:
        paths = [root, *root.rglob("*")]
        for path in paths:
            path.chmod(0o500 if path.is_dir() else 0o400)
        yield ids
        for path in paths:
            path.chmod(0o700 if path.is_dir() else 0o600)


def test_a_read_only_store_serves_readers(read_only: Ids, root: Path, warnings: Warnings) -> None:
    store = Store(root, on_warning=warnings)
    assert store.find(KEY, read_only).complete
    with reopen(store, read_only) as entry:
        assert np.array_equal(read(entry), expected(read_only))
    assert [e.status for e in store.list()].count("complete") == 1
    assert store.find(KEY, make_ids(1300, seed=1)).reused_tokens == 512
    assert not warnings


def test_a_read_only_store_refuses_writers_with_one_error(read_only: Ids, root: Path) -> None:
    store = Store(root)
    with pytest.raises(StoreError, match="locking"):
        build(store, make_ids(100))
    with reopen(store, read_only) as entry, pytest.raises(StoreError, match="locking"):
        store.repair(entry, 0, 512)
    with pytest.raises(StoreError, match="locking"):
        store.remove([store.list()[0].entry_id])


def test_many_readers_while_a_document_is_written(store: Store, root: Path) -> None:
    first, second = make_ids(1300), make_ids(20_000, seed=1)
    build(store, first)[0].close()
    wrong = []

    def reader() -> None:
        mine = Store(root)
        for _ in range(3):
            with reopen(mine, first) as entry:
                if not np.array_equal(read(entry), expected(first)):
                    wrong.append(entry)
            mine.find(KEY, second)

    threads = [threading.Thread(target=reader) for _ in range(50)]
    with store.begin(KEY, SHAPE, second, prefill_block=BLOCK, name="doc") as writer:
        for thread in threads:
            thread.start()
        prefill(writer, second)
        entry = writer.finish()
    for thread in threads:
        thread.join()
    assert not wrong
    assert np.array_equal(read(entry), expected(second))


def test_listing_and_finding_while_entries_come_and_go(store: Store, root: Path) -> None:
    over = threading.Event()
    trouble = []

    def watch() -> None:
        mine = Store(root)
        while not over.is_set():
            try:
                mine.list()
                mine.find(KEY, make_ids(600))
                entry = mine.open(KEY, make_ids(600))
                if entry is not None:
                    with entry:
                        assert np.array_equal(read(entry), expected(entry.ids))
            except BaseException as error:
                trouble.append(error)
                raise

    threads = [threading.Thread(target=watch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for seed in (0, 1) * 8:
        build(store, make_ids(600, seed=seed))[0].close()
        store.prune(0)
    over.set()
    for thread in threads:
        thread.join()
    assert not trouble


def test_opening_a_million_tokens_takes_an_instant_and_no_memory(store: Store, root: Path) -> None:
    """One layer, tiny heads: tokens, hashes and journal have their full length."""
    ids = make_ids(1_048_576)
    key = make_key(chunk_size=512)
    shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=2, kv_dtype="bfloat16")
    with store.begin(key, shape, ids, prefill_block=4096, name="big") as writer:
        for end in range(65_536, len(ids) + 1, 65_536):
            writer.commit(end)
        writer.finish().close()
    code = f"""
import sys, time, numpy as np
from pathlib import Path
from tests.store.synthetic import make_ids, make_key
from tsdoc.store import Store
def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024
ids = make_ids(1_048_576)
Store(Path({str(root)!r})).find(make_key(), ids[:1000])
before = anonymous()
start = time.process_time()
entry = Store(Path({str(root)!r})).open(make_key(chunk_size=512), ids)
took = time.process_time() - start
sys.stdout.write(f"{{entry.num_tokens}} {{took}} {{anonymous() - before}}")
"""
    best = 9.0
    for _ in range(3):  # the best of three, of its own time: other work shares this machine
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        num_tokens, took_s, added = done.stdout.split()
        assert int(num_tokens) == 1_048_576
        assert int(added) < 32 << 20
        best = min(best, float(took_s))
    assert best < 0.2


def test_checked_pages_cost_next_to_nothing(store: Store) -> None:
    entry, _ = build(store, make_ids(20_000))
    read(entry)
    positions = np.arange(0, 20_000, 7)
    took_s = []
    for _ in range(10):  # the best of ten, of this thread's own time: threads of others may spin
        start = time.thread_time()
        for _ in range(10):
            entry.pieces[0].check_range(0, 0, 20_000)
            entry.pieces[0].check_rows(0, positions)
        took_s.append(time.thread_time() - start)
    assert min(took_s) < 0.01
