"""Admission of requests: a bound on running answers, and their end at shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ragkv.serve.refusal import RefusedError, draining

RETRY_AFTER_S = 1


class Gate:
    """Counts the running and waiting answers; used in one event loop.

    Parameters
    ----------
    capacity
        Most answers at a time.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.under_way = 0
        self.draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._end: dict[object, Callable[[RefusedError], None]] = {}

    def enter(self, count: int, end: Callable[[RefusedError], None]) -> Callable[[], None]:
        """Admit a request of ``count`` answers; return the callback for its end.

        Parameters
        ----------
        end
            Ends the request early with the given error.

        Raises
        ------
        RefusedError
            503: too many answers are running, or the server is stopping.
        """
        self.refuse_draining()
        if count > self.capacity - self.under_way:
            raise RefusedError(
                503,
                "Too many requests are waiting: try again later.",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        self.under_way += count
        self._empty.clear()
        key = object()
        self._end[key] = end

        def leave() -> None:
            if self._end.pop(key, None) is not None:
                self.under_way -= count
                if not self._end:
                    self._empty.set()

        return leave

    def refuse_draining(self) -> None:
        """Raise RefusedError, 503, if the server is stopping."""
        if self.draining:
            raise draining()

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109  it ends the answers
        """Refuse new requests, wait ``timeout`` seconds for the answers, and end the rest."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            for end in list(self._end.values()):
                end(draining())
