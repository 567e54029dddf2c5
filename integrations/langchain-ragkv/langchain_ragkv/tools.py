"""Tools: from LangChain's to the engine's, and the engine's calls to LangChain's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    InvalidToolCall,
    ToolCall,
    ToolCallChunk,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from ragkv import Chat, Completion
from ragkv.errors import CutOffError


def definitions(tools: Sequence[Any], *, strict: bool | None = None) -> list[dict[str, Any]]:
    """Return tools, functions, pydantic classes or dicts as OpenAI's tool definitions.

    ``strict`` becomes a part of those that do not say it themselves, unless it is None.
    """
    found = [_definition(tool) for tool in tools]
    if strict is None:
        return found
    return [{**tool, "function": {"strict": strict, **tool["function"]}} for tool in found]


def _definition(tool: Any) -> dict[str, Any]:
    """Return one definition; parameters that refer to themselves are as pydantic writes them.

    LangChain writes references out, and leaves nothing where one comes back to itself.
    """
    found = convert_to_openai_tool(tool)
    given = tool.tool_call_schema if isinstance(tool, BaseTool) else tool
    whole: Any = given.model_json_schema() if hasattr(given, "model_json_schema") else given
    if isinstance(whole, dict) and _is_recursive(whole.get("$defs", {})):
        described = {"title", "description"}
        found["function"]["parameters"] = {
            name: value for name, value in whole.items() if name not in described
        }
    return found


def _is_recursive(definitions: dict[str, Any]) -> bool:
    reached = {
        name: {other for other in definitions if f'"#/$defs/{other}"' in json.dumps(schema)}
        for name, schema in definitions.items()
    }
    for _ in definitions:
        reached = {
            name: direct.union(*(reached[o] for o in direct)) for name, direct in reached.items()
        }
    return any(name in direct for name, direct in reached.items())


def calls(completion: Completion, prompt: Chat) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """Return the answer's calls as LangChain's messages have them.

    A required call that was cut off before its arguments is an invalid call without a name, and
    so is an empty answer to tools.
    """
    valid = [
        tool_call(name=call.name, args=dict(call.arguments), id=call.id)
        for call in completion.tool_calls
    ]
    invalid = [
        invalid_tool_call(name=call.name, args=call.text, id=call.id, error=call.error)
        for call in completion.invalid_tool_calls
    ]
    is_call = prompt.has_to_call or not completion.text
    is_cut_off = completion.finish_reason == "length" and not (valid or invalid)
    if prompt.tools and is_call and is_cut_off:
        error = str(CutOffError(completion.report.decode.tokens))
        invalid.append(invalid_tool_call(name=None, args=completion.text, id=None, error=error))
    return valid, invalid


def cut_off(message: BaseMessage | None) -> CutOffError | None:
    """Return the error of an answer that reached its longest length without a call."""
    if not isinstance(message, AIMessage) or message.tool_calls:
        return None
    if message.response_metadata.get("finish_reason") != "length":
        return None
    return CutOffError(message.usage_metadata["output_tokens"] if message.usage_metadata else 0)


def repeated_cut_off(messages: Sequence[BaseMessage]) -> CutOffError | None:
    """Return the error of a call that an agent repeats without end.

    It was cut off, and nothing was said of it since, or it was cut off twice.
    """
    before, last = [None, None, *(each for each in messages if isinstance(each, AIMessage))][-2:]
    return cut_off(last) if messages[-1] is last or cut_off(before) else None


def call_chunks(completion: Completion, prompt: Chat) -> list[ToolCallChunk]:
    """Return each call as one chunk of a stream.

    LangChain reads a call's arguments when the chunks are joined, and mends JSON that is cut
    short: an invalid call's text is a JSON string, which stays invalid.
    """
    valid, invalid = calls(completion, prompt)
    return [
        tool_call_chunk(
            name=call["name"], args=json.dumps(call["args"]), id=call["id"], index=index
        )
        for index, call in enumerate([*valid, *invalid])
    ]
