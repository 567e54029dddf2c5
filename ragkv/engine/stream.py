"""The engine's results: a prefill, a completion, a stream of text."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from transformers.cache_utils import Cache

from ragkv.decode.generate import FinishReason
from ragkv.decode.listener import TokenLogprobs
from ragkv.engine.requests import Cancelled
from ragkv.errors import ModelInUseError
from ragkv.prompt.tools.calls import InvalidToolCall, ToolCall
from ragkv.recompute.copy_repair import CopyRepair
from ragkv.report.account import ReuseReport


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
        A transformers Cache over all prompt tokens, for calls of the model that go on from it.
    copies
        What ``repair_ahead`` repairs during decoding; None for nothing.
    """

    logits: torch.Tensor
    token_ids: list[int]
    cache: Cache
    report: ReuseReport
    copies: CopyRepair | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer: its text without special tokens and stop texts, its tokens, its report.

    Attributes
    ----------
    finish_reason
        ``"stop"``: the model's end, a stop token or a stop text; ``"length"``: as many tokens as
        were allowed; ``"cancelled"``.
    logprobs, text_logprobs
        Of each token, where they were asked for: by its id; a server's, by its text in OpenAI's
        form.
    tool_calls, invalid_tool_calls
        Calls of a :class:`ragkv.Chat`'s tools; they are not part of ``text``.
    """

    text: str
    token_ids: list[int]
    report: ReuseReport
    finish_reason: FinishReason = "stop"
    logprobs: tuple[TokenLogprobs, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    invalid_tool_calls: tuple[InvalidToolCall, ...] = ()
    text_logprobs: tuple[Mapping[str, Any], ...] = ()

    @property
    def openai_finish_reason(self) -> str:
        """``finish_reason``, or ``"tool_calls"`` where there are some and none was cut off."""
        cut_off = self.finish_reason == "length" and self.invalid_tool_calls
        return "tool_calls" if self.tool_calls and not cut_off else self.finish_reason


_PATIENCE_S = 5.0
_DEADLOCK = (
    "This thread holds the model, for which the stream waits: read it outside of `with kv.turn():`."
)
OnText = Callable[[str], None]
Run = Callable[[OnText, Callable[[], bool], list[TokenLogprobs]], Completion]


@dataclass(slots=True, eq=False)
class _Running:
    """State shared by a stream and its thread, which does not keep the stream alive."""

    pieces: queue.SimpleQueue[str | BaseException | None] = field(default_factory=queue.SimpleQueue)
    cancelled: threading.Event = field(default_factory=threading.Event)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    completion: Completion | None = None
    notify: Callable[[], object] = lambda: None

    def work(self, run: Run) -> None:
        try:
            self.completion = run(self._put, self.cancelled.is_set, self.logprobs)
            self._put(None)
        except Cancelled:
            self._put(None)
        except BaseException as error:  # noqa: BLE001  handed to the reader
            self._put(error)

    def _put(self, piece: str | BaseException | None) -> None:
        self.pieces.put(piece)
        with suppress(RuntimeError):  # the reader's event loop is closed
            self.notify()


class CompletionStream(Iterator[str], AsyncIterator[str]):
    """Pieces of an answer's text while it is being generated.

    Iterate over it, with ``for`` or ``async for``; ``completion`` is the whole answer
    afterwards. Closing it early, leaving its ``with`` or ``async with`` block, or dropping it
    ends the generation.

    Parameters
    ----------
    run
        Generates, in a thread of its own. Takes a callback for text pieces, one that returns
        whether to end, which it calls now and then while it waits for the model and after every
        token, and a list to append log-probabilities to.
    holds_model
        Returns whether the calling thread holds the model, for which ``run`` waits.
    """

    def __init__(self, run: Run, *, holds_model: Callable[[], bool] = lambda: False) -> None:
        self._running = _Running()
        self._holds_model = holds_model
        self._ended = False
        self._thread = threading.Thread(target=self._running.work, args=(run,), daemon=True)
        weakref.finalize(self, self._running.cancelled.set)
        self._thread.start()

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
            There was none within ``timeout`` seconds; the stream goes on.
        ModelInUseError
            The calling thread itself holds the model, as inside :meth:`ragkv.RagKV.turn`.
        """
        if self._ended:
            return None
        patience = _PATIENCE_S if timeout is None and self._holds_model() else timeout
        try:
            return self._taken(self._running.pieces.get(timeout=patience))
        except queue.Empty:
            if timeout is None:
                raise ModelInUseError(_DEADLOCK) from None
            raise TimeoutError(f"no text within {timeout:g} seconds") from None

    async def __anext__(self) -> str:
        """Return the next piece as :meth:`read` does; the event loop goes on meanwhile."""
        ready = asyncio.Event()
        self._running.notify = partial(asyncio.get_running_loop().call_soon_threadsafe, ready.set)
        while not self._ended:
            ready.clear()
            with suppress(queue.Empty):
                piece = self._taken(self._running.pieces.get_nowait())
                if piece is None:
                    break
                return piece
            try:
                await asyncio.wait_for(ready.wait(), _PATIENCE_S if self._holds_model() else None)
            except TimeoutError:
                raise ModelInUseError(_DEADLOCK) from None
        raise StopAsyncIteration

    def _taken(self, piece: str | BaseException | None) -> str | None:
        if isinstance(piece, str):
            return piece
        self._ended = True
        self._thread.join()
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
        if self._running.completion is None or not self._ended:
            raise RuntimeError("read the stream to its end first")
        return self._running.completion

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities of the tokens so far, where they were asked for."""
        return tuple(self._running.logprobs)

    def close(self, *, wait: bool = True) -> None:
        """End the generation after the current token.

        One that still waits for the model does not begin. This returns when it has ended, or at
        once without ``wait`` and in a thread that has the model.
        """
        self._running.cancelled.set()
        if wait and not self._holds_model():
            self._thread.join()
        self._ended = True

    async def aclose(self) -> None:
        """End the generation like :meth:`close`, without waiting."""
        self.close(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
