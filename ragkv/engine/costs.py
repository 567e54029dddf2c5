"""What the model's prefills cost: the user's figures, those kept with the store, or measured."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ragkv.config import StoreConfig
from ragkv.engine.corpus import Corpus
from ragkv.model.lock import ModelLock
from ragkv.store.tiers.costs import CostTable, measure_costs
from ragkv.store.tiers.costs_file import CostsFile

_log = logging.getLogger(__name__)
CACHED, NEW = (0, 256, 1024), (16, 64, 256, 1024)
"""Token counts that are measured, as far as the time goes."""

BUDGET_S = 1.8
PASS_S = 0.3
"""Seconds of all passes, and of the longest: the most that a request waits for one."""


class _Closed(Exception):  # noqa: N818  no error
    """The engine closes."""


class PrefillCosts:
    """Gives the corpus and its store the costs, as soon as they are known.

    Parameters
    ----------
    settings
        PrefillCosts of the user's own are used; others are measured only where there are none.
    """

    def __init__(self, corpus: Corpus, lock: ModelLock, settings: StoreConfig) -> None:
        self._corpus = corpus
        self._lock = lock
        self._file = CostsFile(settings, corpus.loaded)
        self._closed = threading.Event()
        corpus.costs = settings.costs
        kept = None if settings.costs else self._file.read()
        if kept is not None:
            self._use(kept)
        self._wanted = corpus.costs is None

    def take(self) -> bool:
        """Whether they are to be measured; of all callers, one gets True."""
        wanted, self._wanted = self._wanted, False
        return wanted

    def measure(self) -> None:
        """Measure in short passes, each in a turn of its own, and keep the costs."""
        try:
            costs = measure_costs(
                *(self._corpus.loaded, CACHED, NEW),
                budget_s=BUDGET_S,
                pass_s=PASS_S,
                turn=self._turn,
            )
        except _Closed:
            return
        self._use(costs)
        if not costs.is_flat:  # a mere rate ranks as no costs do: the machine may have been busy
            self._file.write(costs)
        _log.info("prefill costs were measured: %s", costs)

    def close(self) -> None:
        """End measuring after the pass under way."""
        self._closed.set()

    def _use(self, costs: CostTable) -> None:
        self._corpus.costs = costs
        self._corpus.store.set_costs(costs)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._closed.is_set():
            raise _Closed
        with self._lock, self._corpus.loaded.without_autocast():
            yield
