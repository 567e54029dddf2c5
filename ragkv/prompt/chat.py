"""A chat with tools: messages, the tools' definitions, and whether one has to be called."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, overload

from ragkv.config import closed_schema
from ragkv.config.checks import check_bool
from ragkv.errors import ConfigError

Message = Mapping[str, Any]
CHOICES = ("auto", "none", "any")


class Chat(Sequence[Message]):
    """The messages of a chat, and tools that the model may call.

    It is a prompt like a list of messages. The definitions go through the model's chat template
    (into the prompt's head), and calls are read out of the answer:
    :attr:`ragkv.Completion.tool_calls`.

    Parameters
    ----------
    messages
        As OpenAI's and transformers' are: answers may have ``tool_calls``, results are messages of
        the role ``"tool"``.
    tools
        ``{"type": "function", "function": {"name", "description", "parameters"}}``, each.
    tool_choice
        ``"auto"``: the model decides. ``"none"``: calls are not read, the definitions stay in the
        prompt. ``"any"``, or the name of a tool: the answer is one call, by constrained decoding,
        which needs ``ragkv[structured]``.
    parallel_tool_calls
        False: an answer has one call at most; generation ends behind it.

    Raises
    ------
    ConfigError
        A tool or the choice is wrong.
    """

    def __init__(
        self,
        messages: Iterable[Message],
        tools: Iterable[Mapping[str, Any]] = (),
        tool_choice: str = "auto",
        *,
        parallel_tool_calls: bool = True,
    ) -> None:
        check_bool("parallel_tool_calls", parallel_tool_calls)
        self._messages = tuple(map(_normal, messages))
        self.tools = tuple(_checked(tool) for tool in tools)
        self.tool_choice = tool_choice
        self.parallel_tool_calls = parallel_tool_calls
        names = [tool["function"]["name"] for tool in self.tools]
        if tool_choice not in {*CHOICES, *names}:
            raise ConfigError(
                f"tool_choice must be one of {', '.join([*CHOICES, *names])}, not {tool_choice!r}"
            )
        if tool_choice == "any" and not names:
            raise ConfigError("tool_choice 'any' needs a tool")

    @staticmethod
    def choice_of(tool_choice: object) -> str:
        """Return the word for a ``tool_choice`` as OpenAI's API writes it; None is ``"auto"``.

        Raises
        ------
        ConfigError
            It is none.
        """
        match tool_choice:
            case None:
                return "auto"
            case "required":
                return "any"
            case str():
                return tool_choice
            case {"function": {"name": str(name)}}:
                return name
        raise ConfigError(
            f"tool_choice must be 'auto', 'none', 'any' or a tool's name, not {tool_choice!r}"
        )

    @property
    def reads_calls(self) -> bool:
        """Whether calls are read out of the answer."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def has_to_call(self) -> bool:
        """Whether the answer has to be one call."""
        return self.tool_choice not in ("auto", "none")

    @property
    def forced_schema(self) -> dict[str, Any] | None:
        """The JSON schema of the one call that the answer has to be; None where it is free."""
        if not self.has_to_call:
            return None
        wanted = [
            tool["function"]
            for tool in self.tools
            if self.tool_choice in ("any", tool["function"]["name"])
        ]
        calls = [_schema_of(function) for function in wanted]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | Sequence[Message]:
        """Return messages, without the tools."""
        return self._messages[index]


def _schema_of(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function.get("parameters") or {"type": "object", "properties": {}}
    arguments = closed_schema(given)
    defined: dict[str, Any] = {
        name: arguments[name] for name in ("$defs", "definitions") if name in arguments
    }
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        **defined,
    }


def _normal(message: Message) -> Message:
    """Return a message as chat templates take it: OpenAI's may have no content, and write JSON."""
    if not isinstance(message, Mapping) or not message.get("tool_calls"):
        return message
    calls = [dict(call) for call in message["tool_calls"]]
    for call in calls:
        function = call.get("function")
        if not isinstance(function, Mapping) or "name" not in function:
            raise ConfigError(f"a message's tool call must have a function's name: {call!r}")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = json.loads(arguments)
        call["function"] = {**function, "arguments": arguments}
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _checked(tool: object) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            "a tool must be {'type': 'function', 'function': {'name', 'description', "
            f"'parameters'}}, not {tool!r}"
        )
    return {"type": "function", **tool}  # type: ignore[dict-item]
