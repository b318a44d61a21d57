"""Makes K and V of a prompt available: opened from the store, resumed, computed, repaired."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tsdoc.errors import (
    CorruptPageError,
    DamagedStoreError,
    DiskFullError,
    StoreError,
    TsdocError,
)
from tsdoc.home import MORE_SPACE, free_bytes
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.shared_kv import make_piece
from tsdoc.progress import Reporter
from tsdoc.prompt.tokenizer import Ids
from tsdoc.session.calibration import Calibration
from tsdoc.session.forecast import Forecast
from tsdoc.session.memory import check_kv_memory
from tsdoc.session.results import Estimate, Outcome
from tsdoc.store.key import KVShape, ModelKey

if TYPE_CHECKING:
    from tsdoc.engine.engine import Engine
    from tsdoc.store import Entry, Repair, Store, Writer

MOST_REPAIRS = 3  # of one block: a disk that loses what was just written does so again


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKV:
    """K and V of a whole prompt.

    Attributes:
        pieces: Cover [0, num_tokens).
        entry: The store's entry they belong to; None when they are only in memory.
        estimate: What was expected of the prefill; it knows what was in the store before.
        outcome: What the prefill took; None where there was nothing to compute.
        prefill_s: Seconds until all was there, with loading the model and waiting for others.
    """

    pieces: tuple[KVPiece, ...]
    entry: Entry | None
    estimate: Estimate
    outcome: Outcome | None
    prefill_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One prompt and everything its K and V depend on.

    Attributes:
        store: Where they are kept; None keeps nothing.
        make_engine: Loads the model when it is needed, for prompts of that many tokens.
        meta: Kept with the entry.
        narrowing: The options that make this document smaller, "" where none is known.
        calibration: Knows what prefills took before.
    """

    store: Store | None
    key: ModelKey
    shape: KVShape
    ids: Ids
    prefill_block: int
    name: str
    meta: dict[str, Any]
    make_engine: Callable[[int], Engine]
    calibration: Calibration
    reporter: Reporter
    narrowing: str = ""
    _repairs: Counter[tuple[str | None, int]] = field(default_factory=Counter, init=False)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return self.shape.token_bytes

    def estimate(self, reused_tokens: int) -> Estimate:
        """What the prefill will cost where `reused_tokens` need not be computed."""
        num_tokens = len(self.ids) - reused_tokens
        measured = self.calibration.read()
        return Estimate(
            prompt_tokens=len(self.ids),
            reused_tokens=reused_tokens,
            prefill_tokens=num_tokens,
            prefill_s=num_tokens / measured.tokens_per_s if measured is not None else None,
            kv_bytes=num_tokens * self.bytes_per_token,
            free_disk_bytes=free_bytes(self.calibration.home.store),
            memory_bytes=measured.memory_bytes if measured is not None else None,
            memory_tokens=measured.memory_tokens if measured is not None else 0,
        )

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
            return PromptKV(
                pieces=tuple(entry.pieces),
                entry=entry,
                estimate=self.estimate(len(self.ids)),
                outcome=None,
                prefill_s=0.0,
            )
        try:
            try:
                return self._into_store(self.store)
            except DamagedStoreError as error:  # while it was written: somebody cut the file
                self.warn_damaged(error)
                return self._into_store(self.store)
        except (DiskFullError, StoreError) as error:
            if must_keep:
                raise
            self._check_memory(error)
            message = f"{error.message}; going on in memory, nothing is kept"
            self.reporter.warn("not_kept", error.where or "", message)
            return self._into_memory()

    def warn_damaged(self, error: DamagedStoreError) -> None:
        """Says that a file of the store became useless while it was in use."""
        self.reporter.warn(error.code, error.where or "", f"{error.message}; computing it again")

    def repair(self, engine: Engine, error: CorruptPageError, holder: Entry | Writer) -> None:
        """Recomputes the block that `error` names, and says so; later blocks stay valid.

        Raises:
            StoreError: it was computed again before, and does not stay what it was.
        """
        assert self.store is not None  # noqa: S101 - only pages of a store can be damaged
        place = (error.where, error.start)
        self._repairs[place] += 1
        if self._repairs[place] > MOST_REPAIRS:
            raise StoreError(
                f"{error.message}, though computed again {MOST_REPAIRS} times: the disk fails",
                where=error.where,
                hint="Point TSDOC_HOME to another disk, or keep nothing with --no-store.",
            ) from error
        message = f"{error.message}; computing tokens {error.start:,} to {error.end:,} again"
        self.reporter.warn("page_repaired", error.where or "", message)
        with self.store.repair(holder, error.start, error.end) as block:
            self._compute(engine, block, block.ids, block.commit, holder)

    def _compute(
        self,
        engine: Engine,
        room: Repair | Writer,
        ids: Ids,
        on_block: Callable[[int], None],
        holder: Entry | Writer,
        on_work: Callable[[int], None] | None = None,
    ) -> None:
        """Computes `ids` from where `room` is on; what is damaged before that, first.

        Args:
            engine: Computes.
            room: Takes K and V.
            ids: From the prompt's first on.
            on_block: See `Engine.prefill`; commits to `room`.
            holder: Has what stands before.
            on_work: See `Engine.prefill`.
        """
        while room.num_committed < len(ids):
            try:
                engine.prefill(
                    room.pieces,
                    ids,
                    room.num_committed,
                    prefill_block=self.prefill_block,
                    on_block=on_block,
                    on_work=on_work,
                )
            except CorruptPageError as error:
                self.repair(engine, error, holder)

    def _into_store(self, store: Store) -> PromptKV:
        begun = time.perf_counter()
        self.reporter.start("prefill", len(self.ids), "tokens")
        with store.begin(
            self.key,
            self.shape,
            self.ids,
            prefill_block=self.prefill_block,
            name=self.name,
            meta=self.meta,
            on_wait=self._waiting(),
        ) as writer:
            self.reporter.advance(writer.num_committed)
            estimate = self.estimate(writer.num_committed)
            outcome = None
            if estimate.prefill_tokens:
                engine = self.make_engine(len(self.ids))
                estimate = self._with_plan(estimate, engine)
                outcome = self._fill(engine, writer, estimate)
            self.reporter.finish()
            entry = writer.finish()
        return PromptKV(
            pieces=tuple(entry.pieces),
            entry=entry,
            estimate=estimate,
            outcome=outcome,
            prefill_s=time.perf_counter() - begun,
        )

    def _with_plan(self, estimate: Estimate, engine: Engine) -> Estimate:
        """Adds what will lie in a GPU's memory; says what makes answers slow."""
        from tsdoc.kernels.interface import Planning

        backend = engine.backend
        plan = backend.memory_plan(len(self.ids)) if isinstance(backend, Planning) else None
        if plan is not None and plan.on_host and engine.index is None:
            self.reporter.note(
                "every token of an answer reads all keys from the machine's own memory; "
                "without index=none it reads few of them"
            )
        return replace(estimate, device=plan)

    def _forecast(self, estimate: Estimate, *, kept: bool) -> Forecast:
        return Forecast(
            estimate, self.calibration, self.reporter, kept=kept, narrowing=self.narrowing
        )

    def _fill(self, engine: Engine, writer: Writer, estimate: Estimate) -> Outcome | None:
        with self._forecast(estimate, kept=True) as forecast:

            def on_block(end: int) -> None:
                writer.commit(end)
                forecast.advance(end)

            self._compute(engine, writer, self.ids, on_block, writer, self.reporter.working)
        return forecast.outcome

    def _into_memory(self) -> PromptKV:
        piece = make_piece(
            self.calibration.device,
            start=0,
            capacity=len(self.ids),
            num_layers=self.shape.num_layers,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            kv_dtype=self.shape.kv_dtype,
            num_ranks=self.calibration.num_ranks,
        )
        engine = self.make_engine(len(self.ids))
        begun = time.perf_counter()
        self.reporter.start("prefill", len(self.ids), "tokens")
        estimate = self._with_plan(self.estimate(0), engine)
        with self._forecast(estimate, kept=False) as forecast:
            engine.prefill(
                [piece],
                self.ids,
                0,
                prefill_block=self.prefill_block,
                on_block=forecast.advance,
                on_work=self.reporter.working,
            )
        self.reporter.finish()
        return PromptKV(
            pieces=(piece,),
            entry=None,
            estimate=estimate,
            outcome=forecast.outcome,
            prefill_s=time.perf_counter() - begun,
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
        """Without a store, K and V must fit in memory; a GPU's is looked at by its backend."""
        if self.calibration.device != "cpu":
            return
        less = f" ({self.narrowing})" if self.narrowing else ""
        room = cause.hint if cause is not None and cause.hint else MORE_SPACE
        check_kv_memory(
            len(self.ids),
            self.shape,
            "cpu",
            hint=f"{room} Or read less{less}.",
            cause=cause,
        )
