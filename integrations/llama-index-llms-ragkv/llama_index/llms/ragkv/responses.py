"""From the engine's completion to LlamaIndex's responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import asdict
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)

from ragkv import Completion
from ragkv.answer.stream import TextStream
from ragkv.errors import CutOffError

Begin = Callable[[], TextStream]


def as_completion(completion: Completion, delta: str | None = None) -> CompletionResponse:
    """Return the whole answer with its report; ``usage`` is where token counters look.

    Both the report and ``raw`` say ``finish_reason``.

    A tool call that cannot be parsed becomes text.
    """
    report = completion.report.to_dict()
    ended = {"finish_reason": completion.openai_finish_reason}
    usage = {
        "prompt_tokens": completion.report.tokens.prompt,
        "completion_tokens": completion.report.decode.tokens,
    }
    raw = {
        "token_ids": list(completion.token_ids),
        "usage": usage,
        "report": report,
        **ended,
        "tool_calls": [asdict(call) for call in completion.tool_calls],
        "invalid_tool_calls": [asdict(call) for call in completion.invalid_tool_calls],
    }
    text = completion.text
    if completion.invalid_tool_calls:
        unread = (call.text for call in completion.invalid_tool_calls)
        text = "\n".join([text, *unread]).strip()
    extra = {**report, **ended}
    return CompletionResponse(text=text, delta=delta, additional_kwargs=extra, raw=raw)


def cut_off(response: ChatResponse) -> CutOffError | None:
    """Return the error of an answer that was cut at its maximum length, else None."""
    raw = response.raw if isinstance(response.raw, dict) else {}
    if raw.get("finish_reason") != "length":
        return None
    return CutOffError(raw["usage"]["completion_tokens"])


def as_chat(response: CompletionResponse) -> ChatResponse:
    """Return the same as a chat response.

    The report stays out of the message: chat memories put a message's extras into the
    next prompt. Tool calls are blocks of it.
    """
    calls = [
        ToolCallBlock(
            tool_call_id=call["id"], tool_name=call["name"], tool_kwargs=dict(call["arguments"])
        )
        for call in (response.raw or {}).get("tool_calls", ())
    ]
    texts = [TextBlock(text=response.text)] if response.text or not calls else []
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, blocks=[*texts, *calls]),
        delta=response.delta,
        raw=response.raw,
        additional_kwargs=response.additional_kwargs,
    )


def responses(
    begin: Begin,
    keep: Callable[[Completion], None],
    form: Callable[[CompletionResponse], Any] = lambda response: response,
) -> Generator[Any, None, None]:
    """Yield a stream's responses; leaving early ends the generation.

    Parameters
    ----------
    keep
        Called with the whole answer, at the end.
    form
        Converts each item.
    """
    so_far = ""
    with begin() as stream:
        for piece in stream:
            so_far += piece
            yield form(CompletionResponse(text=so_far, delta=piece))
        keep(stream.completion)
        yield form(as_completion(stream.completion, delta=""))


async def aresponses(
    begin: Begin,
    keep: Callable[[Completion], None],
    form: Callable[[CompletionResponse], Any] = lambda response: response,
) -> AsyncGenerator[Any, None]:
    """Yield like :func:`responses`; the event loop goes on meanwhile."""
    so_far = ""
    async with begin() as stream:
        async for piece in stream:
            so_far += piece
            yield form(CompletionResponse(text=so_far, delta=piece))
        keep(stream.completion)
        yield form(as_completion(stream.completion, delta=""))
