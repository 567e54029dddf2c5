"""The parts of an engine whose model's chunk caches can be reused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from ragkv.config import ReuseConfig, StoreConfig
from ragkv.engine.auxiliaries import Auxiliaries
from ragkv.engine.background import Background
from ragkv.engine.corpus import Corpus
from ragkv.engine.costs import PrefillCosts
from ragkv.errors import ConfigError
from ragkv.model.loaded import ReusableModel
from ragkv.model.lock import lock_of
from ragkv.report.account import PrecomputeReport
from ragkv.select import Method
from ragkv.store.base import TURNS, Store


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """The model's chunks, those of its auxiliary models, and the work in the background."""

    corpus: Corpus
    auxiliaries: Auxiliaries
    background: Background

    @classmethod
    def over(cls, loaded: ReusableModel, store: Store, settings: StoreConfig) -> Self:
        """Make them over a store."""
        make = partial(Corpus, store=store, lock=lock_of(loaded.model), codec=settings.codec)
        corpus = make(loaded)
        costs = PrefillCosts(corpus, lock_of(loaded.model), settings)
        background = Background(corpus, costs, writable=not settings.read_only)
        return cls(corpus, Auxiliaries(corpus, make), background)

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
        return reports[0]
