"""Passes beside requests: an ingestion's, which give way to them between layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ragkv.decode.batch import batch_of, before_layers
from ragkv.engine.requests import RequestQueue
from ragkv.model.loaded import ReusableModel
from ragkv.model.lock import lock_of

Done = TypeVar("Done")


class PassesBesideRequests:
    """Runs passes of one model; a :class:`ragkv.chunk.encode.Passes`."""

    def __init__(self, loaded: ReusableModel) -> None:
        self._loaded = loaded
        self._lock = lock_of(loaded.model)
        self._requests = self._lock.shared(RequestQueue)

    def run(self, compute: Callable[[], Done]) -> tuple[Done, float]:
        """Return the result of passes, and their seconds without those of waiting for requests."""
        waited = 0.0

        def give_way() -> None:
            nonlocal waited
            waited += self._requests.let_pass()

        with (
            self._lock,
            batch_of(self._loaded).between_layers(self._loaded),
            before_layers(self._loaded, give_way),
        ):
            began = time.perf_counter()
            done = compute()
            return done, time.perf_counter() - began - waited
