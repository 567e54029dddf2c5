"""Read an engine's stream within a timeout; the generation ends with the reader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

from ragkv import CompletionStream, RagKV
from ragkv.serve.client import RemoteRagKV, RemoteStream

Item = TypeVar("Item")
Stream = CompletionStream | RemoteStream


def pieces(stream: Stream, within: float | None = None) -> Iterator[str]:
    """Yield the stream's text pieces, and close it in any case.

    Raises
    ------
    TimeoutError
        The answer is not complete ``within`` seconds of the start.
    """
    clock = _Clock(within)
    try:
        while (piece := clock.read(stream)) is not None:
            if piece:
                yield piece
    finally:
        stream.close(wait=not clock.over)


async def apieces(stream: Stream, within: float | None = None) -> AsyncIterator[str]:
    """Yield like :func:`pieces`, without a thread; a cancelled task ends the stream, too."""
    clock = _Clock(within)
    async with stream:
        while (piece := await clock.aread(stream)) is not None:
            if piece:
                yield piece


def in_turn(kv: RagKV | RemoteRagKV, make: Callable[[], Iterable[Item]]) -> Iterator[Item]:
    """Yield the items of a generator that holds the model, which runs in a thread of its own.

    The reader may be another thread at every item.
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
    """Reads a stream until a timeout."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout
        self._late = f"The answer took longer than timeout={timeout} seconds."
        self.over = False

    def _remaining(self) -> float | None:
        if self._end is None:
            return None
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            self.over = True
            raise TimeoutError(self._late)
        return remaining

    def read(self, stream: Stream) -> str | None:
        remaining = self._remaining()
        try:
            return stream.read(remaining)
        except TimeoutError:
            self.over = True
            raise TimeoutError(self._late) from None

    async def aread(self, stream: Stream) -> str | None:
        remaining = self._remaining()
        try:
            async with asyncio.timeout(remaining):
                return await anext(stream, None)
        except TimeoutError:
            raise TimeoutError(self._late) from None
