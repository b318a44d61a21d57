"""Makes K and V of a prompt available: opened from the store, resumed, computed, repaired."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tsdoc.errors import CorruptPageError, ResourceError, StoreError, TsdocError
from tsdoc.kernels.kv import KVPiece, MemoryPiece
from tsdoc.progress import Reporter
from tsdoc.prompt.tokenizer import Ids
from tsdoc.store.key import KVShape, ModelKey

if TYPE_CHECKING:
    from tsdoc.engine.engine import Engine
    from tsdoc.store import Entry, Store, Writer

LONG_PREFILL_S = 60.0
MEMORY_SHARE = 0.8  # of the free memory that K and V may take where there is no store


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKV:
    """K and V of a whole prompt.

    Attributes:
        pieces: Cover [0, num_tokens).
        entry: The store's entry they belong to; None when they are only in memory.
        reused_tokens: Tokens that were in the store before.
        prefill_s: Seconds spent on the rest.
    """

    pieces: tuple[KVPiece, ...]
    entry: Entry | None
    reused_tokens: int
    prefill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One prompt and everything its K and V depend on.

    Attributes:
        store: Where they are kept; None keeps nothing.
        make_engine: Loads the model when it is needed, for prompts of that many tokens.
        meta: Kept with the entry.
    """

    store: Store | None
    key: ModelKey
    shape: KVShape
    ids: Ids
    prefill_block: int
    name: str
    meta: dict[str, Any]
    make_engine: Callable[[int], Engine]
    reporter: Reporter

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.shape.num_layers * self.shape.row_bytes

    def run(self, *, must_keep: bool = False) -> PromptKV:
        """Opens, resumes or computes K and V.

        Args:
            must_keep: Without a place in the store, computing them would be for nothing.

        Raises:
            ResourceError: neither disk nor memory can hold them.
            ModelError: the weights cannot be loaded.
        """
        if self.store is None:
            self._check_memory(None)
            return self._into_memory()
        entry = self.store.open(self.key, self.ids)
        if entry is not None:
            return self._kept(entry, reused=len(self.ids), prefill_s=0.0)
        try:
            return self._into_store(self.store)
        except (ResourceError, StoreError) as error:
            if must_keep:
                raise
            self._check_memory(error)
            message = f"{error.message}; going on in memory, nothing is kept"
            self.reporter.warn("not_kept", error.where or "", message)
            return self._into_memory()

    def repair(self, engine: Engine, error: CorruptPageError, holder: Entry | Writer) -> None:
        """Recomputes the block that `error` names, and says so; later blocks stay valid."""
        assert self.store is not None  # noqa: S101 - only pages of a store can be damaged
        message = f"{error.message}; recomputed"
        self.reporter.warn("page_repaired", error.where or "", message)
        with self.store.repair(holder, error.start, error.end) as block:
            while block.num_committed < block.end:
                try:
                    engine.prefill(
                        block.pieces,
                        block.ids,
                        block.num_committed,
                        prefill_block=self.prefill_block,
                        on_block=block.commit,
                    )
                except CorruptPageError as earlier:
                    self.repair(engine, earlier, holder)

    def _into_store(self, store: Store) -> PromptKV:
        begun = time.perf_counter()
        self.reporter.start("prefill", len(self.ids), "tokens")
        with store.begin(
            self.key,
            self.shape,
            self.ids,
            prefill_block=self.prefill_block,
            name=self.name,
            on_wait=self._waiting(),
        ) as writer:
            reused = writer.num_committed
            if reused < len(self.ids):
                self._fill(writer)
            self.reporter.finish()
            entry = writer.finish(self.meta)
        return self._kept(entry, reused=reused, prefill_s=time.perf_counter() - begun)

    def _fill(self, writer: Writer) -> None:
        engine = self.make_engine(len(self.ids))
        progress = _Progress(self, start=writer.num_committed, kept=True)

        def on_block(end: int) -> None:
            writer.commit(end)
            progress.advance(end)

        while writer.num_committed < len(self.ids):
            try:
                engine.prefill(
                    writer.pieces,
                    self.ids,
                    writer.num_committed,
                    prefill_block=self.prefill_block,
                    on_block=on_block,
                )
            except CorruptPageError as error:
                self.repair(engine, error, writer)

    def _into_memory(self) -> PromptKV:
        piece = MemoryPiece(
            start=0,
            capacity=len(self.ids),
            num_layers=self.shape.num_layers,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            kv_dtype=self.shape.kv_dtype,
        )
        engine = self.make_engine(len(self.ids))
        begun = time.perf_counter()
        self.reporter.start("prefill", len(self.ids), "tokens")
        progress = _Progress(self, start=0, kept=False)
        engine.prefill(
            [piece], self.ids, 0, prefill_block=self.prefill_block, on_block=progress.advance
        )
        self.reporter.finish()
        return PromptKV(
            pieces=(piece,), entry=None, reused_tokens=0, prefill_s=time.perf_counter() - begun
        )

    @staticmethod
    def _kept(entry: Entry, *, reused: int, prefill_s: float) -> PromptKV:
        return PromptKV(
            pieces=tuple(entry.pieces), entry=entry, reused_tokens=reused, prefill_s=prefill_s
        )

    def _waiting(self) -> Callable[[int], None]:
        """Follows another process that prefills the same document, and says so once."""
        said = False

        def on_wait(committed_tokens: int) -> None:
            nonlocal said
            if not said:
                self.reporter.note("another tsdoc is prefilling this document; waiting for it")
                said = True
            self.reporter.advance(committed_tokens)

        return on_wait

    def _check_memory(self, cause: TsdocError | None) -> None:
        """Without a store, K and V must fit in memory."""
        import psutil

        needed = len(self.ids) * self.bytes_per_token
        free = psutil.virtual_memory().available
        if needed > free * MEMORY_SHARE:
            because = f"{cause.message}, and " if cause else ""
            raise ResourceError(
                f"{because}keeping {needed / 1e9:.1f} GB of K and V in memory instead is not "
                f"possible with {free / 1e9:.1f} GB free",
                where=cause.where if cause else None,
                hint="Free some space, point TSDOC_HOME to a larger disk, or read less "
                "(--pages, --section, --exclude).",
            ) from cause


class _Progress:
    """Shows the prefill, and says once how long it will take when that is more than a minute."""

    def __init__(self, job: Prefill, *, start: int, kept: bool) -> None:
        self._job = job
        self._start = start
        self._kept = kept
        self._begun = time.perf_counter()
        self._said = False
        job.reporter.advance(start)

    def advance(self, end: int) -> None:
        job = self._job
        job.reporter.advance(end)
        rate = (end - self._start) / (time.perf_counter() - self._begun)
        remaining_s = (len(job.ids) - end) / rate
        if self._said or remaining_s < LONG_PREFILL_S:
            return
        self._said = True
        keep = (len(job.ids) - self._start) * job.bytes_per_token / 1e9
        kept = f"{keep:.1f} GB will be kept; Ctrl-C is safe" if self._kept else "nothing is kept"
        job.reporter.note(
            f"{len(job.ids):,} tokens, about {remaining_s / 60:.0f} min more at {rate:.0f} "
            f"tokens/s; {kept}; --pages or --section reads less"
        )
