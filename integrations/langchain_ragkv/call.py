"""One call of the chat model: the engine's arguments, and its answer as a message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from langchain_ragkv.prompts import convert_messages
from langchain_ragkv.responses import metadata, usage
from ragkv import Completion, CompletionStream, RagKV, ReuseReport
from ragkv.serve.client import RemoteRagKV, RemoteStream


@dataclass(frozen=True, slots=True)
class Call:
    """``arguments`` are those of :meth:`ragkv.RagKV.stream`; ``keep`` receives the report."""

    kv: RagKV | RemoteRagKV
    arguments: dict[str, Any]
    timeout: float | None
    keep: Callable[[ReuseReport], None]

    def start(self, messages: Sequence[BaseMessage]) -> CompletionStream | RemoteStream:
        """Begin to generate."""
        if isinstance(self.kv, RemoteRagKV):
            given = {"timeout": self.timeout, **self.arguments}
            return self.kv.stream(convert_messages(messages), **given)
        return self.kv.stream(convert_messages(messages), **self.arguments)

    def result(self, completion: Completion) -> ChatResult:
        """Return the whole answer."""
        message = AIMessage(content=completion.text, **self._account(completion))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def last_chunk(self, completion: Completion) -> ChatGenerationChunk:
        """Return the chunk that ends a stream: no text, but usage and report."""
        message = AIMessageChunk(content="", chunk_position="last", **self._account(completion))
        return ChatGenerationChunk(message=message)

    def _account(self, completion: Completion) -> dict[str, Any]:
        self.keep(completion.report)
        return {
            "usage_metadata": usage(completion),
            "response_metadata": metadata(completion, self.kv),
        }
