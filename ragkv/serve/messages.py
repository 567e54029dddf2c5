"""Chat messages in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator

from ragkv.errors import ConfigError
from ragkv.prompt.messages import arguments_of, text_of
from ragkv.serve.body import Fields
from ragkv.serve.refusal import RefusedError, unsupported

_IGNORED = frozenset(
    {
        *("refusal", "annotations", "audio", "function_call", "parsed", "reasoning", "id", "index"),
        *("type", "status", "object", "created_at", "createdAt", "timestamp", "usage", "created"),
        *("finish_reason", "stop_reason", "logprobs", "token_ids", "tool_name", "metadata"),
        *("reasoning_details", "thinking_blocks", "provider_specific_fields", "extra_content"),
        *("cache_control", "response_metadata", "additional_kwargs", "thinking", "model"),
        *("thought_signature", "citations", "sources", "timings", "service_tier"),
    }
)
"""Fields that clients copy from earlier answers and that change no prompt."""


class CalledFunction(Fields):
    """The function of a tool call."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[dict[str, Any], BeforeValidator(arguments_of)] = {}


class CalledTool(Fields):
    """A tool call in an earlier answer; clients' additions, such as an index, are ignored."""

    model_config = ConfigDict(extra="ignore")

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Fields):
    """A chat message; the parts of its content are joined to one text."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True)] = []
    tool_call_id: str = ""
    name: str = ""
    reasoning_content: str = ""

    @field_validator("role", mode="before")
    @classmethod
    def _known_role(cls, role: object) -> object:
        if role == "function":
            raise unsupported("messages", f"messages with the role {role!r}")
        return "system" if role == "developer" else role  # its newer name

    @field_validator("content", mode="before")
    @classmethod
    def _as_text(cls, content: object) -> object:
        try:
            return text_of(content) if isinstance(content, list) else content
        except ConfigError as error:
            raise RefusedError(
                400, f"messages: {error}.", param="messages", code="unsupported_parameter"
            ) from None

    @property
    def plain(self) -> dict[str, Any]:
        """The message without empty fields; only a tool's result has a name for templates."""
        names = {"role", "content"} | {name for name, value in self if value}
        if self.role != "tool":
            names.discard("name")
        return self.model_dump(include=names)


def read_message(message: object) -> object:
    """Return a client's message without the fields that change no prompt.

    Raises
    ------
    RefusedError
        400: a field would change the prompt and is not supported.
    """
    if not isinstance(message, Mapping):
        return message
    for name in ("function_call", "audio"):
        if message.get(name):
            raise unsupported("messages", f"messages with {name}")
    read = {name: value for name, value in message.items() if name not in _IGNORED}
    thought = message.get("reasoning_content", message.get("reasoning"))
    read.pop("reasoning_content", None)
    return {**read, "reasoning_content": thought} if isinstance(thought, str) else read


def check_results(messages: Sequence[Message]) -> None:
    """Refuse a tool's result without an earlier call, with 400."""
    called: set[str] = set()
    for at, message in enumerate(messages):
        called |= {call.id for call in message.tool_calls}
        if message.role != "tool":
            continue
        given = message.tool_call_id
        # a call or a result without an id matches any
        if not called or (given and given not in called and "" not in called):
            known = f": its calls are {', '.join(sorted(called))}" if called else ""
            raise RefusedError(
                400,
                f"messages.{at}: a message of the role 'tool' must have the tool_call_id of a "
                f"call in an earlier message's tool_calls, not {given!r}{known}.",
                param=f"messages.{at}.tool_call_id",
                code="invalid_value",
            )
