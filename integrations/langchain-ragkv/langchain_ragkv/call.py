"""One call of a model: the engine's arguments, and its answer with usage and report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from langchain_ragkv.keywords import Keywords
from ragkv import Chat, Completion, ReuseReport
from ragkv.answer.engine import Engine
from ragkv.answer.stream import TextStream


@dataclass(frozen=True, slots=True)
class Call:
    """``arguments`` are those of :meth:`ragkv.RagKV.stream`; ``keep`` receives the report.

    ``keywords`` are the call's keywords that are no argument of it.
    """

    kv: Engine
    model_name: str
    arguments: dict[str, Any]
    timeout: float | None
    keep: Callable[[ReuseReport], None]
    keywords: Keywords

    def start(self, prompt: str | Chat) -> TextStream:
        """Begin to generate."""
        form: dict[str, Any] = {}
        if isinstance(prompt, Chat) and prompt.has_to_call:
            form = {"json_schema": None}  # the answer is the call
        stream = self.kv.stream(prompt, **self.arguments | form)
        return stream if self.timeout is None else stream.within(self.timeout)

    def account(self, completion: Completion) -> tuple[UsageMetadata, dict[str, Any]]:
        """Keep the report; return the usage, and ``model_name``, ``finish_reason`` and the like.

        ``cache_read`` counts the prompt's reused tokens, including the sink and earlier turns.
        ``cache_creation`` is 0: chunks are encoded, and turns kept, after the answer. The report
        omits fields that repeat the prompt, since messages are stored, traced and sent:
        ``positions``, and the ``text`` of ``chunks``. ``misses`` have the first 80 characters.
        """
        self.keep(completion.report)
        report = completion.report
        written = report.to_dict()
        del written["positions"]
        for use in written["chunks"]:
            del use["text"]
        found: dict[str, Any] = {
            "model_name": self.model_name,
            "finish_reason": completion.openai_finish_reason,
            "ragkv": written,
        }
        if completion.text_logprobs:
            found["logprobs"] = {"content": [dict(each) for each in completion.text_logprobs]}
        usage = UsageMetadata(
            input_tokens=report.tokens.prompt,
            output_tokens=report.decode.tokens,
            total_tokens=report.tokens.prompt + report.decode.tokens,
            input_token_details=InputTokenDetails(
                cache_read=report.tokens.cached, cache_creation=0
            ),
        )
        return usage, found
