"""The parts of an engine whose model's chunk caches can be reused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from ragkv.config import ReuseConfig, StoreConfig
from ragkv.engine.account import account_of
from ragkv.engine.auxiliaries import Auxiliaries
from ragkv.engine.background import Background
from ragkv.engine.corpus import Corpus
from ragkv.engine.former import FormerPrompts
from ragkv.engine.healing import Healing
from ragkv.engine.pipeline import Pipeline
from ragkv.engine.plan import Account, Plan
from ragkv.engine.request import Request, check_revision
from ragkv.engine.requests import RequestQueue
from ragkv.engine.versions import Versions
from ragkv.explain.miss_log import MissLog
from ragkv.model.loaded import ReusableModel
from ragkv.model.lock import lock_of
from ragkv.model.memory import default_history
from ragkv.report.account import PrecomputeReport
from ragkv.select import Method
from ragkv.store.base import TierUse
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.prefixes.tree import PrefixTree


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """The model's chunks and their versions, former prompts, healing, auxiliary models."""

    corpus: Corpus
    auxiliaries: Auxiliaries
    background: Background
    former: FormerPrompts
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
    ) -> Self:
        """Make them over a store; ``costs`` are those that the store weighs entries by."""
        make = partial(Corpus, store=store, lock=lock_of(loaded.model), codec=settings.codec)
        corpus = make(loaded)
        budget = default_history() if settings.history_bytes is None else settings.history_bytes
        tree = PrefixTree(budget, costs) if budget else None
        former = FormerPrompts(corpus, tree)
        writable = not settings.read_only
        requests = lock_of(loaded.model).shared(RequestQueue)
        versions = Versions(corpus, former, writable=writable)
        healing = Healing(corpus, former, versions, requests, budget)
        background = Background(corpus, former, versions, healing, writable=writable)
        made = cls(corpus, Auxiliaries(corpus, make), background, former, versions, healing)
        corpus.on_removed = made._drop_former
        return made

    def pipeline(self, requests: RequestQueue) -> Pipeline:
        """Return what runs prompts over these chunks."""
        kept = self.former, self.versions
        return Pipeline(self.corpus, self.auxiliaries.scorer, requests, *kept)

    def warm_up(self, config: ReuseConfig, method: Method) -> None:
        """Encode the sink; load the method's auxiliary model."""
        self.corpus.sink_for(config)
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
        show_progress: bool | None,
    ) -> PrecomputeReport:
        """Encode the missing chunks, for the method's auxiliary model too."""
        config, method = setting
        corpora = [(self.corpus, self.corpus.sink_for(config))]
        if method.auxiliary:
            corpora.append(self.auxiliaries.corpus(config))
        reports = [
            corpus.encode(
                *(chunks, sink),
                document=document,
                revision=check_revision(revision, document),
                expires_in=expires_in,
                show_progress=show_progress,
            )
            for corpus, sink in corpora
        ]
        if config.history:
            self.versions.note_ingested(chunks)
        self._drop_former_after(reports[0].removed)
        return reports[0]

    def load(self, named: Sequence[str], setting: tuple[ReuseConfig, Method]) -> None:
        """Start loading chunks that the next prompts will contain."""
        config, method = setting
        heal = config.history and method.uses_chunks
        self.background.fetch(named, partial(self.corpus.sink_for, config), heal=heal)

    def delete(self, text: str) -> int:
        """Delete a chunk, and what former prompts left of it; return the number of entries."""
        deleted = self._drop_former_after(self.corpus.forget(text))
        if not deleted:  # it may have been evicted before
            self._drop_former([text])
        return deleted

    def forget_document(self, document: str) -> int:
        """Delete a document's own chunks, and what former prompts left; return how many."""
        return self._drop_former_after(self.corpus.store.forget_document(document))

    def account(self, request: Request, plan: Plan) -> Account:
        """Return the chunks that were not reused, and what the user could change."""
        stores = self.background.stores(request)
        return account_of(request, plan, self.corpus, self.miss_log, stores=stores)

    @property
    def tiers(self) -> tuple[TierUse, ...]:
        """Bytes and hits of the store's tiers, of former prompts and of versions."""
        return (
            *self.corpus.store.tiers_in_use(),
            *self.former.in_use(),
            *self.versions.in_use(),
        )

    def _drop_former_after(self, deleted: int) -> int:
        if deleted and not self.corpus.refresh():
            self._drop_former(None)
        return deleted

    def _drop_former(self, texts: Sequence[str] | None) -> None:
        """Drop what depends on some chunks; None for any."""
        if texts is None:
            self.former.clear()
        else:
            self.former.drop(texts)
        self.healing.drop(texts)
        self.versions.drop_deleted()
