"""LangChain's messages as the role and content that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from ragkv.errors import ConfigError

_ROLES: dict[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
}
_NOT_TEXT_BUT_SILENT = ("reasoning", "thinking", "redacted_thinking", "tool_call", "tool_use")
"""Blocks of an earlier answer that are not part of its text."""


def convert_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return ``{"role", "content"}`` messages, tool calls in transformers' form.

    Raises
    ------
    ConfigError
        There is no message, or one holds an image, audio or a file.
    """
    if not messages:
        raise ConfigError("At least one message is needed.")
    return [_convert(message) for message in messages]


def _convert(message: BaseMessage) -> dict[str, Any]:
    out: dict[str, Any] = {"role": _role(message), "content": _text(message)}
    if isinstance(message, AIMessage) and message.tool_calls:
        out["tool_calls"] = [
            {"type": "function", "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        out["tool_call_id"] = message.tool_call_id
        if message.name:
            out["name"] = message.name
    return out


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise ConfigError(
        f"{type(message).__name__} has no role in a chat template: use a system, human, AI, "
        "tool or ChatMessage."
    )


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(_block_text(block) for block in message.content)


def _block_text(block: str | dict[Any, Any]) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind == "text":
        return str(block["text"])
    if kind in _NOT_TEXT_BUT_SILENT:
        return ""
    raise ConfigError(
        f"Content of type {kind!r} cannot be read by a text model: give its text, as a string "
        "or as {'type': 'text', 'text': ...} blocks."
    )
