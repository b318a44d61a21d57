"""The seam between the command line and the library.

Commands reach sessions, documents, models and the store through a `Services` object alone: its
methods import what they need when they are called, so that `tsdoc --help` stays light, and tests
hand in an object of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsdoc.errors import ModelError, ResourceError

if TYPE_CHECKING:
    from tsdoc.cli.counting import CountTexts
    from tsdoc.eval.request import EvalReport, EvalRequest
    from tsdoc.eval.run import OnKept
    from tsdoc.home import Home
    from tsdoc.ingest.document import Document
    from tsdoc.ingest.options import IngestOptions
    from tsdoc.models.locate import LocatedModel
    from tsdoc.profile.request import ProfileRequest
    from tsdoc.profile.results import Report
    from tsdoc.progress import Reporter
    from tsdoc.session import Conversation, Session
    from tsdoc.session.kept import KeptConversation
    from tsdoc.session.parts import By, Part
    from tsdoc.session.repairing import Repairer
    from tsdoc.session.summary import Length, Summarizer
    from tsdoc.settings import Settings
    from tsdoc.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A model that can be named: by a profile, or because it is on this disk.

    Attributes:
        directory: Where it lies; None when it is not on this disk.
        path: The profile's file; None for a model without one.
    """

    name: str
    source: str
    licence: str | None
    download_bytes: int | None
    directory: Path | None
    path: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelListing:
    """All models, and the name of the default where that was decided."""

    models: tuple[ListedModel, ...]
    default: str | None
    default_reason: str | None


class Services:
    """What commands ask of the library."""

    def home(self) -> Home:
        """Returns TSDOC_HOME."""
        from tsdoc.home import find_home

        return find_home()

    def open_session(
        self,
        *,
        settings: Settings,
        home: Home,
        sources: Sequence[str],
        ingest: IngestOptions,
        reporter: Reporter,
        offline: bool,
    ) -> AbstractContextManager[Session]:
        """Opens a session on sources; see `tsdoc.session.open_session`."""
        from tsdoc.session import open_session

        return open_session(
            settings=settings,
            home=home,
            sources=sources,
            ingest=ingest,
            reporter=reporter,
            offline=offline,
        )

    def open_conversation(
        self, session: Session, *, name: str | None
    ) -> AbstractContextManager[Conversation]:
        """Begins or takes up a conversation; see `tsdoc.session.Conversation`."""
        from tsdoc.session import Conversation

        return Conversation(session=session, name=name)

    def check_conversation(self, home: Home, name: str) -> None:
        """Refuses what is no name for a conversation."""
        from tsdoc.session.kept import conversation_path

        conversation_path(home, name)

    def list_conversations(self, home: Home) -> dict[str, KeptConversation | None]:
        """Lists kept conversations; see `tsdoc.session.kept.list_conversations`."""
        from tsdoc.session.kept import list_conversations

        return list_conversations(home)

    def forget_conversation(self, home: Home, name: str) -> None:
        """Removes a kept conversation; see `tsdoc.session.kept.forget_conversation`."""
        from tsdoc.session.kept import forget_conversation

        forget_conversation(home, name)

    def evaluate(
        self,
        request: EvalRequest,
        *,
        settings: Settings,
        home: Home,
        ingest: IngestOptions,
        reporter: Reporter,
        offline: bool,
        on_kept: OnKept,
    ) -> EvalReport:
        """Measures a model on long texts; see `tsdoc.eval.evaluate`."""
        from tsdoc.eval.evaluate import evaluate

        return evaluate(
            request,
            settings=settings,
            home=home,
            ingest=ingest,
            reporter=reporter,
            offline=offline,
            on_kept=on_kept,
        )

    def open_summarizer(
        self, session: Session, *, length: Length, max_new_tokens: int | None
    ) -> Summarizer:
        """Returns what summarises a session's document."""
        from tsdoc.session.summary import Summarizer

        return Summarizer(session, length, max_new_tokens=max_new_tokens)

    def split_document(self, session: Session, by: By) -> list[Part]:
        """Returns the parts that are summarised one by one."""
        from tsdoc.session.parts import split_document

        return split_document(session.document, session.prompt, by)

    def read_sources(
        self, sources: Sequence[str], options: IngestOptions, reporter: Reporter
    ) -> Document:
        """Reads sources without a model; see `tsdoc.ingest.sources.read_sources`."""
        from tsdoc.ingest.sources import read_sources

        progress = _bytes(reporter)
        return read_sources(
            sources, options, lambda name, done, total: progress("reading", done, total)
        )

    def profile(
        self, request: ProfileRequest, *, settings: Settings, home: Home, reporter: Reporter
    ) -> Report:
        """Measures where the time goes; see `tsdoc.profile.run.run_profile`."""
        from tsdoc.profile.run import run_profile

        return run_profile(request, settings=settings, home=home, reporter=reporter)

    def token_counter(
        self, *, settings: Settings, home: Home, offline: bool, reporter: Reporter
    ) -> CountTexts | None:
        """Returns what counts the tokens of texts; None, with a warning, for want of a tokenizer.

        Fetches the tokenizer where it is not here, after asking.
        """
        from tsdoc.models.locate import locate_tokenizer
        from tsdoc.prompt.tokenizer import TextTokenizer

        try:
            directory = locate_tokenizer(
                settings.model,
                home,
                offline=offline,
                confirm=lambda plan: reporter.confirm(plan.question),
                on_progress=_bytes(reporter),
            )
        except (ModelError, ResourceError) as error:
            if not settings.model.source.startswith(("default", "hf:", "pypi:")):
                raise  # a path, given by the user and of no use
            where = error.where or settings.model.source
            reporter.warn("estimated", where, f"{error.message}; the counts are estimates")
            return None
        finally:
            reporter.finish()
        tokenizer = TextTokenizer(directory)
        return lambda texts: (len(ids) for ids, _ in tokenizer.encode_many(texts))

    def list_models(self, home: Home) -> ModelListing:
        """Lists the models of all profiles, then converted ones that no profile has."""
        from tsdoc.models.converted import list_converted
        from tsdoc.models.default_model import read_default

        default = read_default(home)
        models = [profile for profile in self.list_profiles(home) if profile.name != "default"]
        known = {model.directory for model in models}
        models += [
            ListedModel(
                name=model.name,
                source=model.source,
                licence=None,
                download_bytes=None,
                directory=model.directory,
                path=None,
            )
            for model in list_converted(home)
            if model.directory not in known
        ]
        return ModelListing(
            models=tuple(models),
            default=None if default is None else default.name,
            default_reason=None if default is None else default.reason,
        )

    def get_model(
        self, name: str, *, home: Home, offline: bool, reporter: Reporter
    ) -> LocatedModel:
        """Fetches and converts a model; `name` is a profile or a source."""
        from tsdoc.models.default_model import check_model_name, settings_of
        from tsdoc.models.locate import locate_model

        check_model_name(name)
        return locate_model(
            settings_of(name),
            home,
            offline=offline,
            confirm=lambda plan: reporter.confirm(plan.question),
            on_progress=_bytes(reporter),
        )

    def use_model(self, name: str, *, home: Home) -> str | None:
        """Makes a model the default; returns its name, None when it is to be chosen anew."""
        from tsdoc.models.default_model import set_default

        chosen = set_default(home, name)
        return None if chosen is None else chosen.name

    def list_profiles(self, home: Home) -> list[ListedModel]:
        """Lists the profiles that ship with tsdoc, and whether their models are on this disk."""
        from tsdoc.models.default_model import settings_of
        from tsdoc.models.profiles import list_profiles

        listed = []
        for profile in list_profiles():
            model = settings_of(profile.name)
            listed.append(
                ListedModel(
                    name=profile.name,
                    source=model.source,
                    licence=model.licence,
                    download_bytes=model.download_bytes,
                    directory=_find_model(home, model.source, model.gguf_sha256),
                    path=profile.path,
                )
            )
        return listed

    def load_profile(self, name: str) -> dict[str, Any]:
        """Returns what a profile sets; see `tsdoc.models.profiles.load_profile`."""
        from tsdoc.models.profiles import load_profile

        return load_profile(name)

    def open_store(self, home: Home, *, max_bytes: int | None, reporter: Reporter) -> Store:
        """Opens the store; see `tsdoc.store.store.Store`."""
        from tsdoc.store.store import Store

        return Store(home.store, max_bytes=max_bytes, on_warning=reporter.warn)

    def prefill_rates(self, home: Home) -> dict[str, float]:
        """Returns tokens per second by model key, as this machine was measured to compute them."""
        from tsdoc.session.calibration import read_rates

        return read_rates(home)

    def repairer(
        self, *, settings: Settings, home: Home, store: Store, reporter: Reporter
    ) -> Repairer:
        """Returns what computes damaged entries again; see `tsdoc.session.repairing`."""
        from tsdoc.session.repairing import Repairer

        return Repairer(settings=settings, home=home, store=store, reporter=reporter)

    def remove_records(self, home: Home, keep: Collection[str]) -> None:
        """Removes the text and the summaries of documents, except those of these source records."""
        from tsdoc.prompt.record import MAX_RECORD_BYTES, prune_records
        from tsdoc.session.kept_summaries import remove_summaries

        prune_records(home, max_bytes=MAX_RECORD_BYTES, keep=keep)
        remove_summaries(home, keep)


def _find_model(home: Home, source: str, gguf_sha256: str | None) -> Path | None:
    """Returns where a profile's model lies on this disk, without network; None when it does not."""
    from tsdoc.models.converted import find_converted
    from tsdoc.models.hub import HubModel, HuggingFaceHub

    if gguf_sha256 is not None:
        return find_converted(home, gguf_sha256)
    if source.startswith("hf:"):
        return HuggingFaceHub().cached(HubModel.parse(source), with_weights=True)
    return None


def _bytes(reporter: Reporter) -> Callable[[str, int, int], None]:
    """Returns a callback (stage, bytes done, bytes in all) that shows each stage by its name."""
    current = ""

    def report(stage: str, done: int, total: int) -> None:
        nonlocal current
        if stage != current:
            current = stage
            reporter.start(stage, total or None, "bytes")
        reporter.advance(done)

    return report
