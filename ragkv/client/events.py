"""The events of an answer's stream as a Completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragkv.answer.completion import Completion
from ragkv.errors import CutOffError, ServerError
from ragkv.prompt.tools.calls import InvalidToolCall, ToolCall, last_with, named_call
from ragkv.report.account import ReuseReport


class Events:
    """Collects an answer from the events of its stream."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._finish_reason: Any = None
        self._report: object = None
        self._calls: list[dict[str, str]] = []
        self._logprobs: list[Mapping[str, Any]] = []
        self._token_ids: list[int] = []

    def feed(self, event: Mapping[str, Any]) -> str:
        """Take an event; return its text."""
        self._report = event.get("ragkv") or self._report
        piece = ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            piece += choice.get("text") or delta.get("content") or ""
            self._logprobs += (choice.get("logprobs") or {}).get("content") or ()
            for call in delta.get("tool_calls") or ():  # each comes whole
                self._calls.append({**call["function"], "call_id": call["id"]})
            self._token_ids += choice.get("token_ids") or ()
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        self._text.append(piece)
        return piece

    def completion(self) -> Completion:
        """Return the whole answer.

        Raises
        ------
        ServerError
            The stream ended too soon, or without a report of ragkv.
        """
        if self._finish_reason is None:
            raise ServerError("the server ended the stream before the answer was complete")
        if not isinstance(self._report, Mapping):
            raise ServerError(
                "the server sends no report: the client needs `ragkv serve`, and that with reports"
            )
        report = ReuseReport.from_dict(self._report)
        calls = [named_call(**call) for call in self._calls]
        invalid = tuple(call for call in calls if isinstance(call, InvalidToolCall))
        if self._finish_reason == "length":
            invalid = last_with(invalid, str(CutOffError(report.completion_tokens)))
        return Completion(
            "".join(self._text),
            self._token_ids,
            report,
            finish_reason="stop" if self._finish_reason == "tool_calls" else self._finish_reason,
            tool_calls=tuple(call for call in calls if isinstance(call, ToolCall)),
            invalid_tool_calls=invalid,
            text_logprobs=tuple(self._logprobs),
        )
