"""The key index of an entry: made where it is missing, and how well it selects, kept beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tsdoc.errors import CorruptPageError, DamagedStoreError, ResourceError, StoreError
from tsdoc.progress import Reporter
from tsdoc.store.index_file import VERSION as INDEX_VERSION
from tsdoc.terminal import format_bytes

if TYPE_CHECKING:
    from tsdoc.engine.engine import Engine
    from tsdoc.kernels.index_use import IndexWatch
    from tsdoc.kernels.kv import KVArray, LayerIndex
    from tsdoc.store import Entry, Store
    from tsdoc.store.pages import Segment

MIN_TOKENS = 4096  # shorter segments are read whole
UNKNOWN = -1.0
ROUNDING = 1e-3


def prepare_index(
    entry: Entry,
    store: Store,
    reporter: Reporter,
    repair: Callable[[CorruptPageError], None],
    make_engine: Callable[[], Engine],
) -> bool:
    """Gives every long segment of an entry its key index and fine checksums.

    Nothing depends on them but time: where the store cannot take them, all keys are read.

    Args:
        entry: An open entry.
        store: Whose budget they count towards.
        reporter: Hears of damaged ones, and why there are none.
        repair: Computes what a damaged page held.
        make_engine: Loads the model, whose queries the index is made for.

    Returns:
        Whether the entry has long segments, and all of them have theirs.
    """
    long = [s for s in entry.segments if s.info.end - s.info.start >= MIN_TOKENS]
    done = [_prepare(segment, store, reporter, repair, make_engine) for segment in long]
    return bool(done) and all(done)


def _prepare(
    segment: Segment,
    store: Store,
    reporter: Reporter,
    repair: Callable[[CorruptPageError], None],
    make_engine: Callable[[], Engine],
) -> bool:
    from tsdoc.store.derive import derive, derived_bytes, has_index, is_derivable

    try:
        if has_index(segment):
            return True
    except DamagedStoreError as error:
        reporter.warn(error.code, error.where or "", f"{error.message}; made again")
    if not is_derivable(segment):
        return False
    needed, free = derived_bytes(segment), store.budget() - store.num_bytes()
    if needed > free:
        reporter.warn(
            "no_index",
            str(segment.directory),
            f"the key index needs {format_bytes(needed)} and the store's budget has "
            f"{format_bytes(max(free, 0))} left; all keys are read",
        )
        return False
    from tsdoc.kernels.piece_rows import as_tensor
    from tsdoc.kernels.torch_index import make_layer_index

    engine = make_engine()

    def make_layer(layer: int, keys: KVArray) -> LayerIndex:
        return make_layer_index(as_tensor(keys), engine.query_moment(layer))

    while True:
        try:
            derive(segment, make_layer)
            return True
        except CorruptPageError as error:
            repair(error)
        except (ResourceError, StoreError) as error:
            reporter.warn("no_index", error.where or "", f"{error.message}; all keys are read")
            return False


def recall_shares(engine: Engine, watch: IndexWatch, entry: Entry) -> None:
    """Tells `watch` what earlier sessions found out about the entry's index, if it knows nothing.

    Whoever asks first has the keys in memory; a later question would have to read them for it.
    """
    if watch.num_samples:
        return
    num_layers = engine.runner.decoder.config.num_layers
    for layer, share in enumerate(entry.read_shares(_asked(engine, watch), num_layers) or ()):
        if 0 <= share <= 1 + ROUNDING:  # of a store that was tampered with, too, only shares
            watch.note(layer, share)


def keep_shares(engine: Engine, watch: IndexWatch, entry: Entry) -> None:
    """Keeps what `watch` knows, for sessions to come, if it knows more than was kept."""
    num_layers, asked = engine.runner.decoder.config.num_layers, _asked(engine, watch)
    known = [UNKNOWN if share is None else share for share in watch.known(num_layers)]
    kept = entry.read_shares(asked, num_layers) or [UNKNOWN] * num_layers
    if any(now != UNKNOWN and before == UNKNOWN for now, before in zip(known, kept, strict=True)):
        entry.keep_shares(asked, known)


def _asked(engine: Engine, watch: IndexWatch) -> bytes:
    """What shares depend on: devices differ in how many candidates there are."""
    config, device = watch.config, engine.backend.device.type
    return repr((config.candidates, config.few, INDEX_VERSION, device)).encode()
