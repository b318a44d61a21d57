"""The prompt's K and V written to a store of the profile's own, which is removed afterwards."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tsdoc.engine.commits import Commits
from tsdoc.engine.forward import chunk_bounds
from tsdoc.errors import ResourceError, StoreError
from tsdoc.home import Home, free_bytes, private_dir, write_error
from tsdoc.kernels.interface import Pending
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.torch_cache import Arrived
from tsdoc.profile.bench import Bench, kv_bytes, prompt_key
from tsdoc.profile.disk import write_rate
from tsdoc.profile.results import Kept
from tsdoc.session.resolving import kv_shape
from tsdoc.store import Store

PREFIX = "profile-"
SPARE_BYTES = 256 << 20


@contextmanager
def temporary_home(home: Home) -> Iterator[Path]:
    """A private directory under TSDOC_HOME, removed at the end, as are those of killed runs.

    Raises:
        StoreError: it cannot be made.
        ResourceError: the disk is full.
    """
    root = private_dir(home.root)
    _remove_stale(root)
    try:
        directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root))
    except OSError as error:
        raise write_error(error, root, "making a directory") from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def check_room(directory: Path, num_bytes: int) -> None:
    """Checks that the disk holds the prompt's K and V.

    Raises:
        ResourceError: it does not.
    """
    needed, free = num_bytes + max(SPARE_BYTES, num_bytes // 256), free_bytes(directory)
    if needed > free:
        raise ResourceError(
            f"writing K and V needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free",
            where=str(directory),
            hint="Profile fewer --tokens, or point TSDOC_HOME to a larger disk.",
        )


def measure_keep(bench: Bench, root: Path, on_block: Callable[[int], None]) -> Kept:
    """Writes the prompt's K and V block by block, as a prefill would, and opens them.

    Raises:
        ResourceError: the disk is full.
        StoreError: the store cannot be written.
    """
    num_bytes = kv_bytes(bench.prompt, bench.settings)
    rate = write_rate(root.parent, num_bytes)
    store = Store(root, max_bytes=2 * num_bytes + SPARE_BYTES)
    key, ids = prompt_key(bench.prompt, bench.settings), bench.prompt.ids
    begun = time.perf_counter()
    with store.begin(
        key,
        kv_shape(bench.prompt.config, bench.settings.engine.kv_dtype),
        ids,
        prefill_block=bench.block,
        name="profile",
    ) as writer:
        copy = _copier(bench, writer.pieces)

        def keep(end: int) -> None:
            writer.commit(end)
            on_block(end)

        with Commits(keep, bench.backend.save_ahead) as commits:
            for first, last in chunk_bounds(0, bench.num_tokens, bench.block):
                commits.add(last, copy(first, last))
            commits.finish()
        writer.finish().close()
    write_s = time.perf_counter() - begun
    begun = time.perf_counter()
    entry = store.open(key, ids)
    open_s = time.perf_counter() - begun
    if entry is None:
        raise StoreError("what was just written cannot be opened", where=str(root))
    entry.close()
    return Kept(num_bytes=num_bytes, write_s=write_s, disk_bytes_per_s=rate, open_s=open_s)


def _copier(bench: Bench, pieces: Sequence[KVPiece]) -> Callable[[int, int], Pending]:
    """What begins to bring a range of K and V into `pieces`."""
    if bench.device == "cuda":
        runner = bench.engine().runner
        return bench.loaded.backend.cache(pieces, runner.rope, runner.selection).save

    def copy(first: int, last: int) -> Pending:
        for piece in pieces:
            _copy_rows(bench.piece, piece, first, last, bench.prompt.config.num_layers)
        return Arrived()

    return copy


def _copy_rows(source: KVPiece, target: KVPiece, first: int, last: int, num_layers: int) -> None:
    """Copies the part of [first, last) that `target` holds."""
    begin, end = max(first, target.start), min(last, target.start + target.capacity)
    inside = slice(begin - target.start, end - target.start)
    for layer in range(num_layers):
        target.rows(layer)[inside] = source.rows(layer)[begin:end]


def _remove_stale(root: Path) -> None:
    """Removes what profiles left that were killed."""
    import psutil

    for path in root.glob(f"{PREFIX}*"):
        number = path.name.removeprefix(PREFIX).partition("-")[0]
        if number.isdigit() and not psutil.pid_exists(int(number)) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
