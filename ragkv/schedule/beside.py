"""Work beside requests: ingestion's passes, which requests interrupt, and idle work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ragkv.decode.batch import batch_of, before_layers
from ragkv.model.loaded import ReusableModel
from ragkv.model.lock import lock_of
from ragkv.schedule.requests import Cancelled, GaveWay, RequestQueue

Result = TypeVar("Result")
_PAUSE_S = 0.5
"""Pause of idle work after a request interrupted it, longer than the gap between most calls."""


class PassesBesideRequests:
    """Runs passes that yield the model to requests between layers.

    It is a :class:`ragkv.chunk.encode.Passes`.
    """

    def __init__(self, loaded: ReusableModel) -> None:
        self._loaded = loaded
        self._lock = lock_of(loaded.model)
        self._requests = self._lock.shared(RequestQueue)

    def run(self, compute: Callable[[], Result]) -> tuple[Result, float]:
        """Return the result of passes, and their seconds without the wait for requests."""
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


class IdleWork:
    """Runs passes while no request waits or runs; a request ends them, and they start again."""

    def __init__(self, loaded: ReusableModel, requests: RequestQueue) -> None:
        self._loaded, self._requests = loaded, requests
        self._batch = batch_of(loaded)
        self._gives_way = False
        self._closed = threading.Event()

    def run(self, compute: Callable[[], Result], tokens: int) -> Result:
        """Return the result of ``compute``.

        Parameters
        ----------
        compute
            Passes of the model. It is called again after a request ended it.
        tokens
            Number of rows of its cache.

        Raises
        ------
        Cancelled
            :meth:`close` was called.
        """
        while True:
            self._gives_way = False
            try:
                with (
                    self._requests.turn(
                        self._loaded,
                        tokens=tokens,
                        cancelled=self._closed.is_set,
                        give_way=self._give_way,
                    ),
                    self._loaded.without_autocast(),
                    self._batch.between_layers(self._loaded),
                    before_layers(self._loaded, self._check),
                ):
                    return compute()
            except GaveWay:
                if self._closed.wait(_PAUSE_S):
                    raise Cancelled from None

    def close(self) -> None:
        """End the running pass before its next layer."""
        self._closed.set()

    def _give_way(self) -> None:
        """End the running pass before its next layer; it starts again later."""
        self._gives_way = True

    def _check(self) -> None:
        """Raise Cancelled or GaveWay if the pass must end."""
        if self._closed.is_set():
            raise Cancelled
        others = self._requests.running or self._requests.lock.is_wanted(but=self._batch)
        if self._gives_way or others:
            raise GaveWay
