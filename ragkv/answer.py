"""What the engine returns: a prefill, a completion, a stream of text."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Self

import torch
from transformers.cache_utils import Cache

from ragkv.report import ReuseReport


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
    """

    logits: torch.Tensor
    token_ids: list[int]
    cache: Cache
    report: ReuseReport
    enter: Callable[[], AbstractContextManager[None]] = field(default=nullcontext, repr=False)

    def decoding(self) -> AbstractContextManager[None]:
        """Let the model run on ``cache`` in the block.

        Only a method that changes positions or attention (``ape``) needs it: the block
        then holds the model, and passes over the cache follow the method. For all others
        it does nothing.
        """
        return self.enter()


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer: its text without special tokens and stop texts, its tokens, its account."""

    text: str
    token_ids: list[int]
    report: ReuseReport


Speak = Callable[[str], None]
Run = Callable[[Speak, Callable[[], bool]], Completion]


class CompletionStream(Iterator[str]):
    """Pieces of an answer's text while it is being generated.

    Iterate over it; ``completion`` holds the whole answer afterwards. Closing it
    early, or leaving its ``with`` block, ends the generation.

    Parameters
    ----------
    run
        Generates; is given a function that takes text pieces, and one that says
        whether to end. Runs in a thread of its own.
    """

    def __init__(self, run: Run) -> None:
        self._pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._completion: Completion | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._work, args=(run,), daemon=True)
        self._thread.start()

    def _work(self, run: Run) -> None:
        try:
            self._completion = run(self._pieces.put, self._cancelled.is_set)
            self._pieces.put(None)
        except BaseException as error:  # noqa: BLE001  handed to the reader
            self._pieces.put(error)

    def __next__(self) -> str:
        if self._ended:
            raise StopIteration
        piece = self._pieces.get()
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
        if self._completion is None or not self._ended:
            raise RuntimeError("read the stream to its end first")
        return self._completion

    def close(self) -> None:
        """End the generation after the current token; what it gave so far stays."""
        self._cancelled.set()
        self._thread.join()
        self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
