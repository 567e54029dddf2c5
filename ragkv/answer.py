"""What the engine returns: a prefill, a completion, a stream of text."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Self

import torch
from transformers.cache_utils import Cache

from ragkv.errors import ModelInUseError
from ragkv.report import ReuseReport
from ragkv.select.ahead import Ahead


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """A repaired prompt, ready to decode from.

    Attributes
    ----------
    logits
        ``[vocab]`` float32: of the next token.
    token_ids
        The prompt's tokens.
    cache
        A transformers Cache over all prompt tokens. Run the model on it inside
        ``with prefilled.decoding():``.
    enter
        Makes the context of :meth:`decoding`.
    ahead
        What the steps inside :meth:`decoding` compute again, or None.
    """

    logits: torch.Tensor
    token_ids: list[int]
    cache: Cache
    report: ReuseReport
    enter: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, repr=False)
    ahead: Ahead | None = field(default=None, repr=False)

    def decoding(self) -> AbstractContextManager[None]:
        """Let the model run on ``cache`` in the block.

        The block holds the model where a method has something to do in it: passes over the
        cache then follow what it does to positions and attention (``ape``), and steps of one
        token compute what the answer may copy as well (``query``). For the others it does
        nothing.
        """
        return self.enter()


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer: its text without special tokens and stop texts, its tokens, its account."""

    text: str
    token_ids: list[int]
    report: ReuseReport


_PATIENCE_S = 5.0
_HELD = (
    "This thread holds the model, for which the stream waits: read it outside of "
    "`with kv.turn():` and `with prefilled.decoding():`."
)
Speak = Callable[[str], None]
Run = Callable[[Speak, Callable[[], bool]], Completion]


class Cancelled(Exception):  # noqa: N818  never seen outside
    """Raised by what a stream runs where it ends before there is any answer."""


@dataclass(slots=True, eq=False)
class _Running:
    """What a stream shares with its thread, which does not know the stream."""

    pieces: queue.SimpleQueue[str | BaseException | None] = field(default_factory=queue.SimpleQueue)
    cancelled: threading.Event = field(default_factory=threading.Event)
    completion: Completion | None = None

    def work(self, run: Run) -> None:
        try:
            self.completion = run(self.pieces.put, self.cancelled.is_set)
            self.pieces.put(None)
        except Cancelled:
            self.pieces.put(None)
        except BaseException as error:  # noqa: BLE001  handed to the reader
            self.pieces.put(error)


class CompletionStream(Iterator[str]):
    """Pieces of an answer's text while it is being generated.

    Iterate over it; ``completion`` holds the whole answer afterwards. Closing it
    early, leaving its ``with`` block, or letting go of it ends the generation.

    Parameters
    ----------
    run
        Generates; is given a function that takes text pieces, and one that says
        whether to end. Runs in a thread of its own.
    held
        Says whether the calling thread holds the model, for which ``run`` waits.
    """

    def __init__(self, run: Run, *, held: Callable[[], bool] = lambda: False) -> None:
        self._running = _Running()
        self._held = held
        self._ended = False
        self._thread = threading.Thread(target=self._running.work, args=(run,), daemon=True)
        weakref.finalize(self, self._running.cancelled.set)
        self._thread.start()

    def __next__(self) -> str:
        """Return the next piece.

        Raises
        ------
        ModelInUseError
            The calling thread itself holds the model, as inside :meth:`ragkv.RagKV.turn`.
        """
        if self._ended:
            raise StopIteration
        try:
            piece = self._running.pieces.get(timeout=_PATIENCE_S if self._held() else None)
        except queue.Empty:
            raise ModelInUseError(_HELD) from None
        if isinstance(piece, str):
            return piece
        self._ended = True
        self._thread.join()
        if piece is not None:
            raise piece
        raise StopIteration

    @property
    def completion(self) -> Completion:
        """The whole answer.

        Raises
        ------
        RuntimeError
            The stream has not been read to its end.
        """
        if self._running.completion is None or not self._ended:
            raise RuntimeError("read the stream to its end first")
        return self._running.completion

    def close(self) -> None:
        """End the generation after the current token; what it gave so far stays."""
        self._running.cancelled.set()
        if not self._held():  # it ends when the model is free
            self._thread.join()
        self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
