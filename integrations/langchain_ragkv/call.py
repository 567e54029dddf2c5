"""One call of the chat model: the engine's arguments, and its answer as a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_ragkv.keywords import Keywords
from langchain_ragkv.prompts import convert_messages
from langchain_ragkv.responses import metadata, usage
from langchain_ragkv.tools import call_chunks, calls
from ragkv import Chat, Completion, CompletionStream, RagKV, ReuseReport
from ragkv.serve.client import RemoteRagKV, RemoteStream


@dataclass(frozen=True, slots=True)
class Call:
    """``arguments`` are those of :meth:`ragkv.RagKV.stream`; ``keep`` receives the report.

    ``keywords`` are what no argument of it says.
    """

    kv: RagKV | RemoteRagKV
    arguments: dict[str, Any]
    timeout: float | None
    keep: Callable[[ReuseReport], None]
    keywords: Keywords

    def start(self, messages: Sequence[BaseMessage]) -> CompletionStream | RemoteStream:
        """Begin to generate."""
        prompt = Chat(
            convert_messages(messages),
            self.keywords.tools,
            self.keywords.tool_choice,
            parallel_tool_calls=self.keywords.parallel_tool_calls,
        )
        form = {"json_schema": None} if prompt.has_to_call else {}  # the answer is the call
        if isinstance(self.kv, RemoteRagKV):
            return self.kv.stream(prompt, timeout=self.timeout, **self.arguments | form)
        return self.kv.stream(prompt, **self.arguments | form)

    def result(self, completion: Completion) -> ChatResult:
        """Return the whole answer."""
        valid, invalid = calls(completion)
        account = self._account(completion)
        message = AIMessage(
            content=completion.text, tool_calls=valid, invalid_tool_calls=invalid, **account
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def last_chunk(self, completion: Completion) -> ChatGenerationChunk:
        """Return the chunk that ends a stream: no text, but tool calls, usage and report."""
        chunks, account = call_chunks(completion), self._account(completion)
        message = AIMessageChunk(
            content="", chunk_position="last", tool_call_chunks=chunks, **account
        )
        return ChatGenerationChunk(message=message)

    def _account(self, completion: Completion) -> dict[str, Any]:
        self.keep(completion.report)
        return {
            "usage_metadata": usage(completion),
            "response_metadata": metadata(completion, self.kv),
            "additional_kwargs": self.keywords.parsed(completion.text),
        }
