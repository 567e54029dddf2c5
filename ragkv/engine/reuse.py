"""The parts of an engine whose model's chunk caches can be reused, and the engine's status."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

from ragkv.answer.engine import ModelInfo
from ragkv.chunk.sinks import Sink
from ragkv.config import ReuseConfig, StoreConfig
from ragkv.engine.account import Account, account_of
from ragkv.engine.background import Background
from ragkv.engine.healing import Healing
from ragkv.engine.plan import Plan, Request
from ragkv.engine.planner import Planner
from ragkv.engine.verify import verified
from ragkv.errors import ConfigError
from ragkv.explain.warnings import MissLog
from ragkv.history.history import History
from ragkv.history.tree import PrefixTree
from ragkv.history.versions import Versions
from ragkv.ingest.corpus import Corpus
from ragkv.ingest.documents import check_chunks, check_revision
from ragkv.ingest.encode import encode, get_or_encode
from ragkv.model.default_model import DEFAULT_MODEL
from ragkv.model.load import load_model
from ragkv.model.loaded import LoadedModel, ReusableModel, require_reusable
from ragkv.model.lock import lock_of
from ragkv.model.memory import budget_of
from ragkv.prompt.render import chat_head
from ragkv.report.account import PrecomputeReport
from ragkv.report.ingestion_progress import IngestionProgress
from ragkv.retrieve.named import NamedChunks
from ragkv.schedule.beside import PassesBesideRequests
from ragkv.schedule.requests import RequestQueue
from ragkv.select import Method
from ragkv.select.auxiliary import Auxiliary
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.types import TierUse


class Auxiliaries:
    """The auxiliary models of an engine, loaded by name, with their entries of the same chunks.

    Parameters
    ----------
    primary
        The engine's own corpus: a model can be its own auxiliary.
    make
        Makes the corpus of a different model in the same store.
    """

    def __init__(self, primary: Corpus, make: Callable[[ReusableModel], Corpus]) -> None:
        self._make = make
        self._corpora = {primary.loaded.name: primary}

    def corpus(self, config: ReuseConfig) -> tuple[Corpus, Sink]:
        """Return the corpus of the configured auxiliary model, and its sink."""
        name = config.auxiliary_model or DEFAULT_MODEL
        if name not in self._corpora:
            loaded = verified(load_model(name, None, device="cpu"), "raise")
            self._corpora[name] = self._make(require_reusable(loaded))
        corpus = self._corpora[name]
        return corpus, corpus.sinks.of(chat_head(corpus.loaded.tokenizer))

    def scorer(self, config: ReuseConfig) -> Auxiliary:
        """Return the scorer of chunks. It encodes missing chunks."""
        corpus, sink = self.corpus(config)
        keep = config.on_miss == "store"
        return Auxiliary(
            corpus.loaded,
            sink.rows,
            lambda text: get_or_encode(corpus, text, sink, keep=keep),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """The model's chunks and their versions, history, healing and auxiliary models."""

    corpus: Corpus
    auxiliaries: Auxiliaries
    background: Background
    history: History
    versions: Versions
    healing: Healing
    miss_log: MissLog = field(default_factory=MissLog)

    @classmethod
    def over(
        cls,
        loaded: ReusableModel,
        store: ChunkStore,
        settings: StoreConfig,
        costs: Callable[[int, int], float] | None,
        named: NamedChunks,
    ) -> Self:
        """Return the parts over a store; ``costs`` are those that the store weighs entries by."""

        def make(model: ReusableModel) -> Corpus:
            return Corpus(model, store, PassesBesideRequests(model), settings.codec)

        corpus = make(loaded)
        budget = budget_of(settings.history_bytes)
        tree = PrefixTree(budget, costs) if budget else None
        history = History(loaded, tree, lambda: corpus.sinks.fingerprint)
        writable = not settings.read_only
        requests = lock_of(loaded.model).shared(RequestQueue)
        versions = Versions(
            loaded, store, history, corpus.has, lossless=corpus.is_lossless, writable=writable
        )
        healing = Healing(corpus, history, versions, requests, budget)
        background = Background(corpus, history, versions, healing, named, writable=writable)
        made = cls(corpus, Auxiliaries(corpus, make), background, history, versions, healing)
        corpus.on_removed = made._drop
        return made

    def planner(self) -> Planner:
        """Return a planner of prompts over these chunks."""
        return Planner(self.corpus, self.auxiliaries.scorer, self.history, self.versions)

    def warm_up(self, config: ReuseConfig, method: Method) -> None:
        """Encode the sink; load the method's auxiliary model."""
        self.corpus.sinks.configured(config)
        if method.auxiliary:
            self.auxiliaries.corpus(config)

    def precompute(
        self,
        chunks: Sequence[str],
        setting: tuple[ReuseConfig, Method],
        document: str | None,
        revision: str | None,
        expires_in: float | None,
        *,
        neighbours: bool,
        show_progress: bool | None,
    ) -> PrecomputeReport:
        """Encode the missing chunks, for the method's auxiliary model too, and their versions."""
        config, method = setting
        if neighbours and not (config.history and method.uses_chunks):
            raise ConfigError("neighbours=True needs history=True and a method that reuses chunks")
        if neighbours and not self.versions.are_kept:
            raise ConfigError("this store keeps no versions: neighbours=True needs a folder")
        corpora = [(self.corpus, self.corpus.sinks.configured(config))]
        if method.auxiliary:
            corpora.append(self.auxiliaries.corpus(config))
        reports = [
            encode(
                corpus,
                chunks,
                sink,
                document=document,
                revision=check_revision(revision, document),
                expires_in=expires_in,
                show_progress=show_progress,
            )
            for corpus, sink in corpora
        ]
        if config.history:
            self.versions.note_ingested(chunks)
        self._drop_after(reports[0].removed)
        if not neighbours:
            return reports[0]
        return reports[0] + self._add_versions(chunks, corpora[0][1], show_progress=show_progress)

    def _add_versions(
        self, chunks: Sequence[str], sink: Sink, *, show_progress: bool | None
    ) -> PrecomputeReport:
        """Store versions of the stored chunks, behind one another."""
        began = time.perf_counter()
        stored = [text for text in check_chunks(chunks) if self.corpus.contains(text, sink)]
        missing = [text for text in stored if not self.versions.has(text, sink.fingerprint)]
        versions = nbytes = 0
        lengths = list(map(len, missing))
        with IngestionProgress(lengths, show=show_progress, unit="version") as progress:
            for text, written in self.healing.add_versions(stored, set(missing), sink):
                progress.stored(len(text))
                progress.say_left()
                versions += 1
                nbytes += written
        seconds = time.perf_counter() - began
        return PrecomputeReport(versions=versions, bytes=nbytes, seconds=seconds)

    def load(self, named: Sequence[str], setting: tuple[ReuseConfig, Method]) -> None:
        """Start loading the chunks of the next prompts."""
        config, method = setting
        heal = config.history and method.uses_chunks
        self.background.fetch(named, partial(self.corpus.sinks.configured, config), heal=heal)

    def delete(self, text: str) -> int:
        """Delete a chunk, and its rows in the history; return the number of entries."""
        deleted = self._drop_after(self.corpus.forget(text))
        if not deleted:  # the entry can be evicted already
            self._drop([text])
        return deleted

    def forget_document(self, document: str) -> int:
        """Delete a document's own chunks, and their rows in the history; return their number."""
        return self._drop_after(self.corpus.store.forget_document(document))

    def account(self, request: Request, plan: Plan) -> Account:
        """Return the chunks that were not reused, and the warnings."""
        stores = self.background.stores(request)
        return account_of(request, plan, self.corpus, self.miss_log, stores=stores)

    @property
    def tiers(self) -> tuple[TierUse, ...]:
        """Bytes and hits of the store's tiers, of the history and of versions."""
        return (
            *self.corpus.store.tiers_in_use(),
            *self.history.in_use(),
            *self.versions.in_use(),
        )

    def _drop_after(self, deleted: int) -> int:
        if deleted and not self.corpus.refresh():
            self._drop(None)
        return deleted

    def _drop(self, texts: Sequence[str] | None) -> None:
        """Drop everything that depends on some chunks; None is all chunks."""
        if texts is None:
            self.history.clear()
        else:
            self.history.drop(texts)
        self.healing.drop(texts)
        self.versions.drop_deleted()


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine at one moment.

    Attributes
    ----------
    running, waiting
        Numbers of the model's running requests, and of those that wait for a turn.
    max_running
        The limit of running requests.
    tiers
        Bytes and hits of each tier, of the history and of versions.
    healed_tokens
        Number of tokens that were computed exactly while no request ran.
    """

    running: int
    waiting: int
    max_running: int
    tiers: tuple[TierUse, ...] = ()
    healed_tokens: int = 0


def info_of(loaded: LoadedModel, reuse: Reuse | None) -> ModelInfo:
    """Return the facts of an engine's model; without ``reuse`` it has no fingerprint."""
    digest = None if reuse is None else reuse.corpus.sinks.fingerprint.digest
    template = bool(loaded.tokenizer.chat_template)
    config = getattr(loaded.model, "generation_config", None)
    return ModelInfo(loaded.name, digest, loaded.positions, loaded.unsupported, template, config)


def status_of(requests: RequestQueue, reuse: Reuse | None) -> EngineStatus:
    """Return an engine's state at this moment."""
    status = EngineStatus(requests.running, requests.waiting, requests.max_running)
    if reuse is None:
        return status
    return replace(status, tiers=reuse.tiers, healed_tokens=reuse.healing.tokens)
