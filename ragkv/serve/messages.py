"""Messages and other JSON of clients, before its fields are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ragkv.serve.refusal import RefusedError, unsupported

if TYPE_CHECKING:
    from ragkv.serve.fields import Message

_OF_CLIENTS = ("schema", "parameters", "arguments", "metadata", "chat_template_kwargs")
"""Fields whose value is a client's own JSON, in which null is a value."""
_DEEPEST = 8
"""Objects and lists within one another in which fields of the API are."""

_NOT_READ = (
    *("refusal", "annotations", "audio", "function_call", "parsed", "reasoning"),
    *("id", "index", "type", "status", "object", "created_at", "createdAt", "timestamp", "usage"),
    *("finish_reason", "stop_reason", "logprobs", "token_ids", "tool_name", "metadata"),
    *("reasoning_details", "thinking_blocks", "provider_specific_fields", "extra_content"),
    *("cache_control", "response_metadata", "additional_kwargs", "thinking", "thought_signature"),
    *("model", "created", "citations", "sources", "timings", "service_tier"),
)
"""Fields of messages that clients keep of earlier answers, and that change no prompt."""


def plain_message(message: object) -> object:
    """Return a message without what was empty in an earlier answer, or is for clients alone.

    Raises
    ------
    RefusedError
        400: it has what this server does not read.
    """
    if not isinstance(message, Mapping):
        return message
    for name in ("function_call", "audio"):
        if message.get(name):
            raise unsupported("messages", f"messages with {name}")
    read = {name: value for name, value in message.items() if name not in _NOT_READ}
    thought = message.get("reasoning_content", message.get("reasoning"))
    read.pop("reasoning_content", None)
    return {**read, "reasoning_content": thought} if isinstance(thought, str) else read


def without_nulls(value: Any, depth: int = _DEEPEST) -> Any:
    """Drop the fields that are null, wherever the API has fields."""
    if depth and isinstance(value, dict):
        return {
            name: each if name in _OF_CLIENTS else without_nulls(each, depth - 1)
            for name, each in value.items()
            if each is not None
        }
    if depth and isinstance(value, list):
        return [
            without_nulls(each, depth - 1) if isinstance(each, dict | list) else each
            for each in value
        ]
    return value


def check_results(messages: Sequence[Message]) -> None:
    """Refuse results of tools that no earlier answer has called, with 400."""
    called: set[str] = set()
    for at, message in enumerate(messages):
        called |= {call.id for call in message.tool_calls}
        if message.role != "tool":
            continue
        given = message.tool_call_id
        # a call or a result without an id may be of any
        if not called or (given and given not in called and "" not in called):
            known = f": its calls are {', '.join(sorted(called))}" if called else ""
            raise RefusedError(
                400,
                f"messages.{at}: a message of the role 'tool' must have the tool_call_id of a "
                f"call in an earlier message's tool_calls, and {given!r} is none{known}.",
                param=f"messages.{at}.tool_call_id",
                code="invalid_value",
            )
