"""The parts of an engine whose model's chunk caches can be reused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

from ragkv.config import PREFIX_BYTES, ReuseConfig, StoreConfig
from ragkv.engine.auxiliaries import Auxiliaries
from ragkv.engine.background import Background
from ragkv.engine.conversations import Conversations
from ragkv.engine.corpus import Corpus
from ragkv.engine.costs import PrefillCosts
from ragkv.engine.pipeline import Pipeline
from ragkv.engine.requests import RequestQueue
from ragkv.errors import ConfigError
from ragkv.model.loaded import ReusableModel
from ragkv.model.lock import lock_of
from ragkv.report.account import PrecomputeReport
from ragkv.select import Method
from ragkv.store.base import TURNS, Store, TierUse
from ragkv.store.prefixes.tree import PrefixTree
from ragkv.store.tiers.costs import ALIKE

Deleted = TypeVar("Deleted", bool, int)


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """The model's chunks, its conversations, its auxiliary models, and work in the background."""

    corpus: Corpus
    auxiliaries: Auxiliaries
    background: Background
    conversations: Conversations

    @classmethod
    def over(cls, loaded: ReusableModel, store: Store, settings: StoreConfig) -> Self:
        """Make them over a store."""
        make = partial(Corpus, store=store, lock=lock_of(loaded.model), codec=settings.codec)
        corpus = make(loaded)
        budget = PREFIX_BYTES if settings.prefix_bytes is None else settings.prefix_bytes
        tree = PrefixTree(budget, partial(_seconds, corpus)) if budget else None
        costs = PrefillCosts(corpus, lock_of(loaded.model), settings, tree)
        conversations = Conversations(corpus, tree)
        background = Background(corpus, costs, conversations, writable=not settings.read_only)
        return cls(corpus, Auxiliaries(corpus, make), background, conversations)

    def pipeline(self, requests: RequestQueue) -> Pipeline:
        """Return what runs prompts over these chunks."""
        return Pipeline(self.corpus, self.auxiliaries.scorer, requests, self.conversations)

    def precompute(
        self,
        chunks: Sequence[str],
        config: ReuseConfig,
        method: Method,
        *,
        document: str | None,
        expires_in: float | None,
        show_progress: bool,
    ) -> PrecomputeReport:
        """Encode the missing chunks, for the method's auxiliary model too."""
        if document == TURNS:
            raise ConfigError(f"{TURNS} are the turns that ragkv remembers: name the document else")
        self.background.turns.release(chunks)
        corpora = [(self.corpus, self.corpus.sink_for(config, method))]
        if method.auxiliary:
            corpora.append(self.auxiliaries.corpus(config))
        reports = [
            corpus.encode(
                chunks, sink, document=document, expires_in=expires_in, show_progress=show_progress
            )
            for corpus, sink in corpora
        ]
        self.background.measure_costs()
        self._drop_conversations_after(reports[0].removed)
        return reports[0]

    def forget(self, text: str) -> bool:
        """Delete a chunk, and the conversations, whose prompts may have contained it."""
        return self._drop_conversations_after(self.corpus.forget(text))

    def forget_document(self, document: str) -> int:
        """Delete a document's own chunks, and the conversations; return how many chunks."""
        return self._drop_conversations_after(self.corpus.store.forget_document(document))

    @property
    def tiers(self) -> tuple[TierUse, ...]:
        """Bytes and hits of the store's tiers, and of former prompts."""
        return (*self.corpus.store.tiers_in_use(), *self.conversations.in_use())

    def _drop_conversations_after(self, deleted: Deleted) -> Deleted:
        if deleted:
            self.conversations.clear()
        return deleted


def _seconds(corpus: Corpus, cached: int, new: int) -> float:
    """Return what computing tokens takes, by the costs that are known now."""
    return (corpus.costs or ALIKE)(cached, new)
