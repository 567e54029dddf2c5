"""The text of a server's answer, piece by piece."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial

from ragkv.answer.completion import Completion
from ragkv.answer.stream import Pieces, TextStream
from ragkv.errors import ClosedError

Begin = Callable[[Callable[[str], None]], Future[Completion]]


class RemoteStream(TextStream):
    """An answer's text while a server generates it; to end it early closes the connection.

    Parameters
    ----------
    begin
        Takes a callback for text pieces, and returns the future answer.
    """

    def __init__(self, begin: Begin) -> None:
        super().__init__(Pieces())
        self._answer = begin(self._pieces.put)
        self._answer.add_done_callback(partial(_end, self._pieces))
        weakref.finalize(self, self._answer.cancel)

    @property
    def completion(self) -> Completion:
        """The whole answer."""
        with suppress(CancelledError, TimeoutError):
            if self._ended and self._answer.exception(timeout=0) is None:
                return self._answer.result()
        raise RuntimeError("read the stream to its end first")

    def close(self, *, wait: bool = True) -> None:
        """End the generation, without waiting for the server."""
        del wait
        self._answer.cancel()
        self._ended = True


def _end(pieces: Pieces, answer: Future[Completion]) -> None:
    try:
        pieces.put(answer.exception())
    except CancelledError:
        pieces.put(ClosedError("the client was closed while this answer was under way"))
