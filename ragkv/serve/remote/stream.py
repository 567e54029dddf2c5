"""The text of a remote answer, piece by piece."""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from ragkv.errors import ClosedError

if TYPE_CHECKING:
    from ragkv.answer.completion import Completion

OnText = Callable[[str], None]
Answering = Coroutine[Any, Any, "Completion"]
Submit = Callable[[Answering], "Future[Completion]"]


@dataclass(slots=True, eq=False)
class Arrivals:
    """What an answer's task hands over; it does not keep the stream alive."""

    pieces: queue.SimpleQueue[str | BaseException | None] = field(default_factory=queue.SimpleQueue)
    notify: Callable[[], object] = lambda: None

    def put(self, piece: str | BaseException | None) -> None:
        """Hand over text, an error, or None at the end."""
        self.pieces.put(piece)
        with suppress(RuntimeError):  # the reader's event loop is closed
            self.notify()

    def end(self, answer: Future[Completion]) -> None:
        """Hand over the end of the answer's task."""
        try:
            self.put(answer.exception())
        except CancelledError:
            self.put(ClosedError("the client was closed while this answer was under way"))


class RemoteStream(Iterator[str], AsyncIterator[str]):
    """Pieces of an answer's text while a server generates it: a CompletionStream's twin.

    Iterate over it, with ``for`` or ``async for``; ``completion`` is the whole answer
    afterwards. Closing it early, leaving its ``with`` or ``async with`` block, or dropping it
    closes the connection, which ends the generation.

    Parameters
    ----------
    submit
        Begins a coroutine in the connection's event loop.
    answer
        Receives the answer; takes a callback for text pieces.
    """

    def __init__(self, submit: Submit, answer: Callable[[OnText], Answering]) -> None:
        self._arrivals = Arrivals()
        self._ended = False
        self._answer = submit(answer(self._arrivals.put))
        self._answer.add_done_callback(self._arrivals.end)
        weakref.finalize(self, self._answer.cancel)

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
            There was none within ``timeout`` seconds; the stream goes on. Or the whole answer
            took longer than the client's ``timeout``.
        ServerError, ConfigError, PromptTooLongError
            The server refused the prompt, or failed.
        """
        if self._ended:
            return None
        try:
            return self._taken(self._arrivals.pieces.get(timeout=timeout))
        except queue.Empty:
            raise TimeoutError(f"no text within {timeout:g} seconds") from None

    async def __anext__(self) -> str:
        """Return the next piece as :meth:`read` does; the event loop goes on meanwhile."""
        ready = asyncio.Event()
        self._arrivals.notify = partial(asyncio.get_running_loop().call_soon_threadsafe, ready.set)
        while not self._ended:
            ready.clear()
            with suppress(queue.Empty):
                piece = self._taken(self._arrivals.pieces.get_nowait())
                if piece is None:
                    break
                return piece
            await ready.wait()
        raise StopAsyncIteration

    def _taken(self, piece: str | BaseException | None) -> str | None:
        if isinstance(piece, str):
            return piece
        self._ended = True
        if piece is not None:
            raise piece
        return None

    @property
    def completion(self) -> Completion:
        """The whole answer.

        Raises
        ------
        RuntimeError
            The stream has not been read to its end.
        """
        with suppress(CancelledError, TimeoutError):
            if self._ended and self._answer.exception(timeout=0) is None:
                return self._answer.result()
        raise RuntimeError("read the stream to its end first")

    def close(self, *, wait: bool = True) -> None:
        """End the generation: close the connection, without waiting for the server."""
        del wait
        self._answer.cancel()
        self._ended = True

    async def aclose(self) -> None:
        """End the generation like :meth:`close`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
