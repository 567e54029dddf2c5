"""The text of an answer, piece by piece, for threads and for event loops."""

from __future__ import annotations

import asyncio
import queue
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from ragkv.answer.completion import Completion


@dataclass(slots=True, eq=False)
class Pieces:
    """A queue of text that ends with an error or None; it holds no reference to its stream."""

    arrived: queue.SimpleQueue[str | BaseException | None] = field(
        default_factory=queue.SimpleQueue
    )
    notify: Callable[[], object] = lambda: None
    over: bool = False

    def put(self, piece: str | BaseException | None) -> None:
        """Add text, an error, or None at the end."""
        if piece != "":
            self.over = not isinstance(piece, str)
            self.arrived.put(piece)
            with suppress(RuntimeError):  # the reader's event loop is closed
                self.notify()


class TextStream(Iterator[str], AsyncIterator[str], ABC):
    """Pieces of an answer's text while it is being generated.

    Iterate over it, with ``for`` or ``async for``; ``completion`` is the whole answer
    afterwards. Closing it early, leaving its ``with`` or ``async with`` block, or dropping it
    ends the generation.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._ended = False
        self._begun = time.monotonic()
        self._limit: float | None = None

    def within(self, seconds: float | None) -> Self:
        """Limit the time of the whole answer; reads beyond it raise TimeoutError."""
        self._limit = seconds
        return self

    def __next__(self) -> str:
        """Return the next piece; raises as :meth:`read` does."""
        piece = self.read()
        if piece is None:
            raise StopIteration
        return piece

    def read(self, timeout: float | None = None) -> str | None:
        """Return the next piece, or None at the end.

        Raises
        ------
        TimeoutError
            No piece arrived within ``timeout`` seconds; the stream continues. Or the whole answer
            exceeded the limit of :meth:`within`, and the stream has ended.
        """
        if self._ended:
            return None
        left = self._left()
        patience = timeout if left is None or (timeout is not None and timeout < left) else left
        try:
            return self._taken(self._pieces.arrived.get(timeout=patience))
        except queue.Empty:
            if patience is timeout:
                raise TimeoutError(f"no text within {timeout:g} seconds") from None
            raise self._given_up() from None

    async def __anext__(self) -> str:
        """Return the next piece as :meth:`read` does, without blocking the event loop."""
        ready = asyncio.Event()
        self._pieces.notify = partial(asyncio.get_running_loop().call_soon_threadsafe, ready.set)
        while not self._ended:
            ready.clear()
            left = self._left()
            with suppress(queue.Empty):
                piece = self._taken(self._pieces.arrived.get_nowait())
                if piece is None:
                    break
                return piece
            try:
                await asyncio.wait_for(ready.wait(), left)
            except TimeoutError:
                raise self._given_up() from None
        raise StopAsyncIteration

    def _left(self) -> float | None:
        """Return the seconds until the time limit; None where there is none, or the end is there.

        Raises
        ------
        TimeoutError
            There are none.
        """
        if self._limit is None or self._pieces.over:
            return None
        left = self._begun + self._limit - time.monotonic()
        if left <= 0:
            raise self._given_up()
        return left

    def _given_up(self) -> TimeoutError:
        self.close(wait=False)
        return TimeoutError(f"the answer took longer than timeout={self._limit:g} seconds")

    def _taken(self, piece: str | BaseException | None) -> str | None:
        if isinstance(piece, str):
            return piece
        self._ended = True
        if piece is not None:
            raise piece
        return None

    @property
    @abstractmethod
    def completion(self) -> Completion:
        """The whole answer.

        Raises
        ------
        RuntimeError
            The stream has not been read to its end.
        """

    def whole(self) -> Completion:
        """Read to the end; return the whole answer. An error ends the generation."""
        with self:
            deque(self, maxlen=0)
        return self.completion

    async def awhole(self) -> Completion:
        """Do the same without blocking the event loop."""
        async with self:
            async for _ in self:
                pass
        return self.completion

    @abstractmethod
    def close(self, *, wait: bool = True) -> None:
        """End the generation; return when it has ended, or at once without ``wait``."""

    async def aclose(self) -> None:
        """End the generation like :meth:`close`, without waiting."""
        self.close(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(wait=not self._ended)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
