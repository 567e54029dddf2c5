"""Read an engine's stream, in time, and end the generation when the reader leaves."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

from langchain_core.runnables import run_in_executor

from ragkv import CompletionStream


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


class _Clock:
    def __init__(self, timeout: float | None) -> None:
        self._start = time.monotonic()
        self._timeout = timeout

    def check(self) -> None:
        if self._timeout is not None and time.monotonic() - self._start > self._timeout:
            raise TimeoutError(f"The answer took longer than timeout={self._timeout:g} seconds.")
