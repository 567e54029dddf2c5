"""The engine's results: a prefill, and a stream of an answer's text."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache

from ragkv.answer.completion import Completion, TokenLogprobs
from ragkv.answer.stream import Pieces, TextStream
from ragkv.decode.listener import Progress
from ragkv.errors import ModelInUseError
from ragkv.recompute.copy_repair import CopyRepair
from ragkv.report.account import ReuseReport
from ragkv.schedule.requests import Cancelled


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
        A transformers Cache over all prompt tokens, for calls of the model that continue from it.
    copies
        Repair of copied tokens during decoding; None if the method has none.
    """

    logits: torch.Tensor
    token_ids: list[int]
    cache: Cache
    report: ReuseReport
    copies: CopyRepair | None = field(default=None, repr=False)


_PATIENCE_S = 5.0
_DEADLOCK = (
    "This thread holds the model that the stream waits for: read it outside of `with kv.turn():`."
)
OnText = Callable[[str], None]
Run = Callable[[OnText, Callable[[], bool], Progress], Completion]


@dataclass(slots=True, eq=False)
class _Running(Pieces):
    """State shared by a stream and its thread, which does not keep the stream alive."""

    cancelled: threading.Event = field(default_factory=threading.Event)
    progress: Progress = field(default_factory=Progress)
    completion: Completion | None = None

    def work(self, run: Run) -> None:
        try:
            self.completion = run(self.put, self.cancelled.is_set, self.progress)
            self.put(None)
        except Cancelled:
            self.put(None)
        except BaseException as error:  # noqa: BLE001  handed to the reader
            self.put(error)


class CompletionStream(TextStream):
    """An answer's text while a thread generates it.

    Parameters
    ----------
    run
        Generates in a separate thread. Takes a callback for pieces of text, one that returns
        whether to end (called while waiting for the model and after every token), and the progress
        to update.
    holds_model
        Returns whether the calling thread holds the model that ``run`` waits for.
    """

    def __init__(self, run: Run, *, holds_model: Callable[[], bool] = lambda: False) -> None:
        self._running = _Running()
        super().__init__(self._running)
        self._holds_model = holds_model
        self._thread = threading.Thread(target=self._running.work, args=(run,), daemon=True)
        weakref.finalize(self, self._running.cancelled.set)
        self._thread.start()

    def read(self, timeout: float | None = None) -> str | None:
        """Return the next piece as every stream does.

        Raises
        ------
        ModelInUseError
            The calling thread itself holds the model, as inside :meth:`ragkv.RagKV.turn`.
        """
        if timeout is not None or not self._waits_for_itself():
            return super().read(timeout)
        try:
            return super().read(_PATIENCE_S)
        except TimeoutError:
            raise ModelInUseError(_DEADLOCK) from None

    async def __anext__(self) -> str:
        """Return the next piece; raises as :meth:`read` does."""
        if not self._waits_for_itself():
            return await super().__anext__()
        try:
            return await asyncio.wait_for(super().__anext__(), _PATIENCE_S)
        except TimeoutError:
            raise ModelInUseError(_DEADLOCK) from None

    def _waits_for_itself(self) -> bool:
        return not self._ended and self._limit is None and self._holds_model()

    def _taken(self, piece: str | BaseException | None) -> str | None:
        if not isinstance(piece, str):
            self._thread.join()
        return super()._taken(piece)

    @property
    def completion(self) -> Completion:
        """The whole answer."""
        if self._running.completion is None or not self._ended:
            raise RuntimeError("read the stream to its end first")
        return self._running.completion

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities of the tokens so far, if requested."""
        return tuple(self._running.progress.logprobs)

    @property
    def tokens(self) -> tuple[int, int]:
        """Numbers of tokens of the prompt, and of the answer so far."""
        return self._running.progress.prompt_tokens, self._running.progress.tokens

    @property
    def chunks(self) -> tuple[str, ...]:
        """The known chunks in the prompt; none before the first text."""
        return self._running.progress.chunks

    def close(self, *, wait: bool = True) -> None:
        """End the generation after the current token, or before it begins.

        Returns when the generation has ended; immediately if ``wait`` is False or the calling
        thread holds the model.
        """
        self._running.cancelled.set()
        if wait and not self._holds_model():
            self._thread.join()
        self._ended = True
