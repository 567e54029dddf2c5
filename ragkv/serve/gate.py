"""Who may come in: bounds the answers under way, and drains them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ragkv.serve.refusal import RefusedError, draining

RETRY_AFTER_S = 1


class Gate:
    """Counts the answers under way; used in one event loop.

    Parameters
    ----------
    capacity
        Most answers that may run and wait.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.under_way = 0
        self.draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._end: dict[object, Callable[[RefusedError], None]] = {}

    def enter(self, count: int, end: Callable[[RefusedError], None]) -> Callable[[], None]:
        """Let a request of ``count`` answers in; return what it calls when it ends.

        Parameters
        ----------
        end
            Ends the request early, for the reason that it is given.

        Raises
        ------
        RefusedError
            503: too many answers are under way, or the server is stopping.
        """
        self.refuse_draining()
        if count > self.capacity - self.under_way:
            raise RefusedError(
                *(503, "Too many requests are waiting: try again later."),
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

    async def drain(self, timeout: float) -> None:  # noqa: ASYNC109  its answers are ended then
        """Let nobody in any more; wait for the answers under way, and end those that take longer.

        ``timeout`` is in seconds.
        """
        self.draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._empty.wait()
        except TimeoutError:
            for end in list(self._end.values()):
                end(draining())
