"""Read an engine's stream, in time, and end the generation when the reader leaves."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

from langchain_core.runnables import run_in_executor

from ragkv import CompletionStream, RagKV

Item = TypeVar("Item")


def pieces(stream: CompletionStream, within: float | None = None) -> Iterator[str]:
    """Yield the stream's text pieces; close it at the end, whatever the end is.

    Raises
    ------
    TimeoutError
        A token came later than ``within`` seconds after the start.
    """
    clock = _Clock(within)
    try:
        for piece in stream:
            clock.check()
            if piece:
                yield piece
    finally:
        stream.close()


async def apieces(stream: CompletionStream, within: float | None = None) -> AsyncIterator[str]:
    """Yield like :func:`pieces`, waiting off the event loop; a cancelled task ends it, too."""
    clock = _Clock(within)
    try:
        while (piece := await run_in_executor(None, next, stream, None)) is not None:
            clock.check()
            if piece:
                yield piece
    finally:
        await run_in_executor(None, stream.close)


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
    def __init__(self, timeout: float | None) -> None:
        self._start = time.monotonic()
        self._timeout = timeout

    def check(self) -> None:
        if self._timeout is not None and time.monotonic() - self._start > self._timeout:
            raise TimeoutError(f"The answer took longer than timeout={self._timeout:g} seconds.")
