"""An answer of a server, piece by piece."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from typing import Any

from ragkv.answer.completion import Completion
from ragkv.answer.stream import Pieces, TextStream
from ragkv.errors import ClosedError, CutOffError, ServerError
from ragkv.prompt.tools.calls import InvalidToolCall, ToolCall, last_with, named_call
from ragkv.report.account import ReuseReport


class RemoteStream(TextStream):
    """An answer's text while a server generates it; closing it early closes the connection.

    Parameters
    ----------
    begin
        Takes a callback for text pieces and returns the future answer.
    """

    def __init__(self, begin: Callable[[Callable[[str], None]], Future[Completion]]) -> None:
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
        pieces.put(ClosedError("the client was closed during this answer"))


class AnswerEvents:
    """Collects an answer from the events of its stream."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._finish_reason: Any = None
        self._report: object = None
        self._calls: list[InvalidToolCall | ToolCall] = []
        self._logprobs: list[Mapping[str, Any]] = []
        self._token_ids: list[int] = []

    def feed(self, event: Mapping[str, Any]) -> str:
        """Add an event; return its text."""
        self._report = event.get("ragkv") or self._report
        piece = ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            piece += choice.get("text") or delta.get("content") or ""
            self._logprobs += (choice.get("logprobs") or {}).get("content") or ()
            for call in delta.get("tool_calls") or ():  # each is complete
                self._calls.append(named_call(**call["function"], call_id=call["id"]))
            self._token_ids += choice.get("token_ids") or ()
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        self._text.append(piece)
        return piece

    def completion(self) -> Completion:
        """Return the whole answer.

        Raises
        ------
        ServerError
            The stream ended too early, or without a report of ragkv.
        """
        if self._finish_reason is None:
            raise ServerError("the server ended the stream before the answer was complete")
        if not isinstance(self._report, Mapping):
            raise ServerError("the server sends no report: the client needs `ragkv serve`")
        report = ReuseReport.from_dict(self._report)
        invalid = tuple(call for call in self._calls if isinstance(call, InvalidToolCall))
        if self._finish_reason == "length":
            invalid = last_with(invalid, str(CutOffError(report.decode.tokens)))
        return Completion(
            "".join(self._text),
            self._token_ids,
            report,
            finish_reason="stop" if self._finish_reason == "tool_calls" else self._finish_reason,
            tool_calls=tuple(call for call in self._calls if isinstance(call, ToolCall)),
            invalid_tool_calls=invalid,
            text_logprobs=tuple(self._logprobs),
        )
