"""Computing what is damaged of kept entries again, from their own token ids: no source is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tsdoc.errors import ModelError, StoreError, TsdocError
from tsdoc.home import Home
from tsdoc.kernels.devices import resolve_device
from tsdoc.models.converted import list_converted
from tsdoc.models.locate import LocatedModel, locate_model
from tsdoc.progress import Reporter
from tsdoc.session.calibration import Calibration
from tsdoc.session.loading import (
    LoadedModel,
    build_engine,
    load_model,
    warn_of_few_cores,
)
from tsdoc.session.prefill import Prefill
from tsdoc.session.resolving import kv_shape
from tsdoc.settings import ModelSettings, SelectionSettings, Settings
from tsdoc.store import PAGE_SIZE, EntryInfo, ModelKey, Store
from tsdoc.store.key import Ids, entry_id

if TYPE_CHECKING:
    from tsdoc.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What became of one entry.

    Attributes:
        num_blocks: Damaged blocks that were computed again.
        num_tokens: Tokens that were computed for that.
        problem: Why it is still not whole; None where it is.
    """

    num_blocks: int = 0
    num_tokens: int = 0
    problem: str | None = None


@dataclass(slots=True, kw_only=True)
class Repairer:
    """Repairs entries with the models on this disk; nothing is downloaded.

    Attributes:
        settings: The model to look at first, device, threads.
    """

    settings: Settings
    home: Home
    store: Store
    reporter: Reporter
    _models: dict[str, LocatedModel] = field(default_factory=dict, init=False)
    _loaded: dict[tuple[str, str], LoadedModel] = field(default_factory=dict, init=False)

    def repair(self, info: EntryInfo) -> Repaired:
        """Checks every page of an entry and computes what is damaged again."""
        if info.status in ("stale", "newer"):
            age = "an older" if info.status == "stale" else "a newer"
            return Repaired(problem=f"was written by {age} tsdoc")
        if info.status == "incomplete":
            return Repaired()  # what it has is checked when its document is asked about again
        try:
            found = self._repair_pages(info) if info.status == "complete" else None
            if found is not None:
                return found
            computed = self._compute(info)
            pages = self._repair_pages(info) or Repaired()  # those that it had were not read yet
            return Repaired(
                num_blocks=computed.num_blocks + pages.num_blocks,
                num_tokens=computed.num_tokens + pages.num_tokens,
            )
        except TsdocError as error:
            return Repaired(problem=str(error))

    def _repair_pages(self, info: EntryInfo) -> Repaired | None:
        """Repairs blocks in place; None where more than pages is damaged."""
        try:
            entry = self.store.load(info.entry_id)
        except StoreError:
            return None
        with entry:
            self.reporter.start(f"verify {info.name}", None, "pages")
            damaged = self.store.verify(entry, lambda done, _: self.reporter.advance(done))
            self.reporter.finish()
            num_tokens = sum(error.end - error.start for error in damaged)
            if damaged:
                job = self._job(info, entry.ids)
                engine = job.make_engine(entry.num_tokens)
                self.reporter.start("compute again", num_tokens, "tokens")
                done = 0
                for error in damaged:
                    job.repair(engine, error, entry)
                    done += error.end - error.start
                    self.reporter.advance(done)
                self.reporter.finish()
        return Repaired(num_blocks=len(damaged), num_tokens=num_tokens)

    def _compute(self, info: EntryInfo) -> Repaired:
        """Computes an entry of which a whole file is lost."""
        ids = self.store.token_ids(info.entry_id)
        if ids is None:
            raise StoreError(
                "its token ids are lost", hint="Ask about its sources again, or remove it."
            )
        kv = self._job(info, ids).run(must_keep=True)
        if kv.entry is not None:
            kv.entry.close()
        block = _block(info)
        num_tokens = kv.estimate.prefill_tokens
        return Repaired(num_blocks=-(-num_tokens // block), num_tokens=num_tokens)

    def _job(self, info: EntryInfo, ids: Ids) -> Prefill:
        try:
            key = ModelKey(**info.model)
        except TypeError as error:
            raise StoreError("what it was computed with is lost") from error
        if key.digest != info.model_key or entry_id(key.digest, ids) != info.entry_id:
            raise StoreError("what it was computed with is lost")
        model = self._find_model(key, str(info.meta.get("model", "")))
        return Prefill(
            store=self.store,
            key=key,
            shape=kv_shape(model.config, key.kv_dtype),
            ids=ids,
            prefill_block=_block(info),
            name=info.name,
            meta=dict(info.meta),
            make_engine=self._engine_maker(model, key),
            calibration=Calibration.of(self.settings, home=self.home, model_key=key.digest),
            reporter=self.reporter,
        )

    def _find_model(self, key: ModelKey, name: str) -> LocatedModel:
        if key.model not in self._models:
            self._look_for(key.model)
        model = self._models.get(key.model)
        if model is None:
            raise ModelError(
                "the model that computed it is not on this disk",
                where=name or None,
                hint="Name it with --model or --profile.",
            )
        if model.config.rope.fields() != key.rope:
            raise ModelError("another tsdoc reads its RoPE differently", where=model.name)
        return model

    def _look_for(self, fingerprint: str) -> None:
        """Looks at the model of the settings, then at those that were converted."""
        candidates = [self.settings.model]
        candidates += [
            ModelSettings(source=str(found.directory), name=found.name)
            for found in list_converted(self.home)
        ]
        for settings in candidates:
            try:
                model = locate_model(settings, self.home, offline=True, confirm=lambda plan: False)
            except TsdocError:  # one that is not here cannot be the one
                continue
            self._models.setdefault(model.fingerprint, model)
            if model.fingerprint == fingerprint:
                return

    def _engine_maker(self, model: LocatedModel, key: ModelKey) -> Callable[[int], Engine]:
        fields = {f: getattr(key, f) for f in SelectionSettings.model_fields}
        selection = SelectionSettings.model_validate(fields)
        engine = self.settings.engine.model_copy(update={"kv_dtype": key.kv_dtype})
        device = resolve_device(engine.device)
        name = (model.fingerprint, key.compute_dtype)

        def make(max_tokens: int) -> Engine:
            if name not in self._loaded:
                warn_of_few_cores(self.settings.parallel, device, self.reporter)
                self._loaded[name] = load_model(
                    model, engine, key.compute_dtype, device, self.settings.parallel
                )
            return build_engine(
                self._loaded[name],
                selection,
                max_tokens=max_tokens,
                question_chunk_size=selection.chunk_size,
            )

        return make


def _block(info: EntryInfo) -> int:
    """Block size of the run that computed the entry; where that is lost, any that fits."""
    return info.prefill_block or 8 * math.lcm(PAGE_SIZE, int(info.model["chunk_size"]))
