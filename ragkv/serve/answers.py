"""The answers of one request: several streams of an engine, read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from ragkv.answer.completion import Completion, TokenLogprobs
from ragkv.engine.stream import CompletionStream
from ragkv.serve.refusal import RefusedError


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of one answer.

    Attributes
    ----------
    logprobs
        Requested log-probabilities of the tokens since the last piece.
    tokens
        Counts of the prompt's tokens, and of the answer's so far.
    completion
        The whole answer, with its last piece.
    """

    index: int
    text: str
    logprobs: Sequence[TokenLogprobs] = ()
    tokens: tuple[int, int] = (0, 0)
    completion: Completion | None = None


class Answers:
    """Iterates over the pieces of several streams until a deadline.

    Parameters
    ----------
    deadline
        Time of the event loop's clock, in seconds.

    Attributes
    ----------
    deadline
        As given.
    leave
        Called by :meth:`close`.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._parts: asyncio.Queue[AnswerPart | Exception] = asyncio.Queue()
        self._streams: list[CompletionStream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._unfinished = 0
        self.leave: Callable[[], None] = lambda: None

    def add(self, stream: CompletionStream) -> None:
        """Begin to read a stream."""
        index = len(self._streams)
        self._streams.append(stream)
        self._unfinished += 1
        self._tasks.append(asyncio.create_task(self._read(index, stream)))

    @property
    def chunks(self) -> list[str]:
        """The known chunks in the prompts of the answers that have begun."""
        return [text for stream in self._streams for text in stream.chunks]

    async def _read(self, index: int, stream: CompletionStream) -> None:
        seen = 0
        try:
            async for text in stream:
                new = stream.logprobs[seen:]
                seen += len(new)
                if text or new:
                    self._parts.put_nowait(AnswerPart(index, text, new, stream.tokens))
            completion = stream.completion
            rest = completion.logprobs[seen:]
            self._parts.put_nowait(AnswerPart(index, "", rest, stream.tokens, completion))
        except Exception as error:  # noqa: BLE001  raised by __anext__
            self._parts.put_nowait(error)

    def __aiter__(self) -> AsyncIterator[AnswerPart]:
        return self

    async def __anext__(self) -> AnswerPart:
        """Return the next piece of any answer.

        Raises
        ------
        RefusedError
            504 at the deadline; the reason given to :meth:`fail`.
        Exception
            An engine's error in one of the answers.
        """
        if not self._unfinished:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout_at(self.deadline):
                part = await self._parts.get()
        except TimeoutError:
            raise RefusedError(504, "The answer took too long.", code="timeout") from None
        if isinstance(part, Exception):
            raise part
        if part.completion is not None:
            self._unfinished -= 1
        return part

    def fail(self, reason: RefusedError) -> None:
        """End the request with this error, after the pieces that have arrived."""
        for task in self._tasks:
            task.cancel()
        self._parts.put_nowait(reason)

    def close(self) -> None:
        """Cancel the running answers, without waiting for them."""
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:
            stream.close(wait=False)
        self.leave()
