"""LlamaIndex's messages and templates in the forms that the engine reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.ragkv.tools import tool_blocks

from ragkv.errors import ConfigError

_ROLES = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
}
"""Roles that chat templates know by another name."""
_NOT_TEXT = ("image", "audio", "video", "document", "citable")


def as_dicts(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates, tool calls and their results among them.

    Raises
    ------
    ConfigError
        A message has an image, a document or the like, which would be lost.
    """
    for block in (block for message in messages for block in message.blocks):
        if block.block_type in _NOT_TEXT:
            raise ConfigError(
                f"A message's block of type {block.block_type!r} cannot be read by a text model: "
                "give its text, as a string or in a TextBlock."
            )
    return [_as_dict(message) for message in messages]


def _as_dict(message: ChatMessage) -> dict[str, Any]:
    role = _ROLES.get(message.role, message.role.value)
    out: dict[str, Any] = {"role": role, "content": message.content or ""}
    extra = message.additional_kwargs
    calls = [
        {
            "id": call.tool_call_id,
            "type": "function",
            "function": {"name": call.tool_name, "arguments": call.tool_kwargs},
        }
        for call in tool_blocks(message)
    ]
    given = calls or [_plain(call) for call in extra.get("tool_calls") or ()]
    if given:
        out["tool_calls"] = given
    if role == "tool":
        out |= {name: extra[name] for name in ("tool_call_id", "name") if extra.get(name)}
    return out


def _plain(call: Any) -> Any:
    """Return a call as OpenAI's package has it, or as a dict, as a dict."""
    return call.model_dump() if hasattr(call, "model_dump") else call


def as_template(given: str | PromptTemplate | dict[str, Any]) -> PromptTemplate:
    """Return a template from its text, or from the output of ``to_dict``."""
    text = given["template"] if isinstance(given, dict) else given
    return PromptTemplate(text) if isinstance(text, str) else text
