"""Work that has the model while no request wants it, and gives way to the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ragkv.decode.batch import batch_of, before_layers
from ragkv.engine.requests import Cancelled, GaveWay, RequestQueue
from ragkv.model.loaded import ReusableModel

Result = TypeVar("Result")
_PAUSE_S = 0.5
"""After it gave way, so that its first layers do not come between each two of many calls."""


class IdleWork:
    """Passes of one thread, each begun anew until no request came between."""

    def __init__(self, loaded: ReusableModel, requests: RequestQueue) -> None:
        self._loaded, self._requests = loaded, requests
        self._batch = batch_of(loaded)
        self._gives_way = False
        self._closed = threading.Event()

    def run(self, compute: Callable[[], Result], tokens: int) -> Result:
        """Return what ``compute`` returns; it is called while no request waits or runs.

        Parameters
        ----------
        compute
            Passes of the model, in which a request may end it: it is called again then.
        tokens
            Rows of its cache.

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
        """End what runs before its next layer."""
        self._closed.set()

    def _give_way(self) -> None:
        """End the pass that runs before its next layer."""
        self._gives_way = True

    def _check(self) -> None:
        """Raise Cancelled or GaveWay where the pass is to end."""
        if self._closed.is_set():
            raise Cancelled
        others = self._requests.running or self._requests.lock.is_wanted(but=self._batch)
        if self._gives_way or others:
            raise GaveWay
