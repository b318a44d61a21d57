"""K and V of a session's prompt, had once they are needed, and mended while they are used."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from tsdoc.errors import CorruptPageError, DamagedStoreError
from tsdoc.kernels.devices import Device
from tsdoc.session.engines import Engines
from tsdoc.session.indexing import prepare_index
from tsdoc.session.prefill import Prefill, PromptKV
from tsdoc.session.resolving import uses_index
from tsdoc.session.results import Estimate
from tsdoc.settings import Settings

if TYPE_CHECKING:
    from tsdoc.engine.engine import Engine
    from tsdoc.store import Entry


class KeptPrompt:
    """Opens, resumes or computes K and V on the first `get`, and holds them until it is closed.

    Args:
        job: How they are computed and kept.
        settings: Say whether questions use a key index.
        device: Where questions are computed.
        engines: For repairs.
        times_s: Takes the seconds of a prefill.
    """

    def __init__(
        self,
        job: Prefill,
        *,
        settings: Settings,
        device: Device,
        engines: Engines,
        times_s: dict[str, float],
    ) -> None:
        self.job = job
        self._settings = settings
        self._device = device
        self._engines = engines
        self._times_s = times_s
        self._kv: PromptKV | None = None
        self._resources = ExitStack()

    @property
    def entry(self) -> Entry | None:
        """The store's entry, where K and V were already had from or written to one."""
        return self._kv.entry if self._kv is not None else None

    def close(self) -> None:
        """Gives up K and V, and the entry's protection from eviction."""
        self._kv = None
        self._resources.close()

    def estimate(self) -> Estimate:
        """Looks up what the store already holds; computes nothing."""
        job = self.job
        reused = job.store.find(job.key, job.ids).reused_tokens if job.store else 0
        return job.estimate(reused)

    def get(self, *, must_keep: bool = False) -> PromptKV:
        """K and V of the whole prompt.

        Args:
            must_keep: Fails where the store has no room, instead of going on in memory.

        Raises:
            ResourceError: neither disk nor memory can hold them.
            ModelError: the weights cannot be loaded.
        """
        if self._kv is None:
            kv = self.job.run(must_keep=must_keep)
            if kv.entry is not None:
                self._resources.enter_context(kv.entry)
                # Other devices bring all of it to their own memory.
                if self._device == "cpu" and not self._prepare_index(kv.entry):
                    kv.entry.check_ahead()
            if kv.prefill_s:
                self._times_s["prefill"] = kv.prefill_s
            self._kv = kv
        return self._kv

    def repair(self, engine: Engine, error: CorruptPageError) -> None:
        """Computes the damaged block again.

        Raises:
            CorruptPageError: `error`, where K and V are not from the store.
        """
        if self.entry is None:
            raise error
        self.job.repair(engine, error, self.entry)

    def get_again(self, error: DamagedStoreError) -> PromptKV:
        """Computes what `error` says is gone.

        Raises:
            DamagedStoreError: `error`, where K and V are not from the store.
        """
        if self.entry is None:
            raise error
        self.job.warn_damaged(error)
        self.entry.close()
        self._kv = None
        return self.get()

    def _prepare_index(self, entry: Entry) -> bool:
        """Whether questions can find candidates without reading all keys of `entry`."""
        job = self.job
        uses = uses_index(self._settings, self._device, entry.num_tokens)
        if job.store is None or not uses:
            return False
        return prepare_index(
            entry,
            job.store,
            job.reporter,
            lambda error: job.repair(self._engines.make(entry.num_tokens), error, entry),
            lambda: self._engines.make(entry.num_tokens),
        )
