"""Read an engine's stream, in time, and end the generation when the reader leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

from ragkv import CompletionStream, RagKV

Item = TypeVar("Item")


def pieces(stream: CompletionStream, within: float | None = None) -> Iterator[str]:
    """Yield the stream's text pieces; close it at the end, whatever the end is.

    Raises
    ------
    TimeoutError
        The answer is not there ``within`` seconds after the start.
    """
    clock = _Clock(within)
    try:
        while (piece := clock.read(stream)) is not None:
            if piece:
                yield piece
    finally:
        stream.close(wait=not clock.over)


async def apieces(stream: CompletionStream, within: float | None = None) -> AsyncIterator[str]:
    """Yield like :func:`pieces`, without a thread; a cancelled task ends the stream, too."""
    clock = _Clock(within)
    async with stream:
        while (piece := await clock.aread(stream)) is not None:
            if piece:
                yield piece


def in_turn(kv: RagKV, make: Callable[[], Iterable[Item]]) -> Iterator[Item]:
    """Yield what another generator of the model gives, which holds the model meanwhile.

    A thread of its own does: who reads may be another thread every time.
    """
    items: SimpleQueue[Item | BaseException | None] = SimpleQueue()

    def work() -> None:
        try:
            with kv.turn():
                for item in make():
                    items.put(item)
            items.put(None)
        except BaseException as error:  # noqa: BLE001  handed to the reader
            items.put(error)

    Thread(target=work, daemon=True).start()
    while (item := items.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item


class _Clock:
    """Reads a stream until its time is over."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout
        self._late = f"The answer took longer than timeout={timeout} seconds."
        self.over = False

    def _left(self) -> float | None:
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            self.over = True
            raise TimeoutError(self._late)
        return left

    def read(self, stream: CompletionStream) -> str | None:
        left = self._left()
        try:
            return stream.read(left)
        except TimeoutError:
            self.over = True
            raise TimeoutError(self._late) from None

    async def aread(self, stream: CompletionStream) -> str | None:
        left = self._left()
        try:
            async with asyncio.timeout(left):
                return await anext(stream, None)
        except TimeoutError:
            raise TimeoutError(self._late) from None
