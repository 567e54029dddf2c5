"""A chat with tools: messages, definitions of tools, and the choice among them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from ragkv.config.checks import check_bool, checked_variables
from ragkv.config.json_schema import DOCUMENT
from ragkv.errors import ConfigError
from ragkv.prompt.messages import Message, check_json, normal_messages

CHOICES = ("auto", "none", "any")
_WORDS = ("auto", "none", "required")


class Chat(Sequence[Message]):
    """The messages of a chat, and tools that the model may call.

    It is used as a prompt like a list of messages. The chat template writes the definitions into
    the prompt's head, and calls are parsed from the answer: :attr:`ragkv.Completion.tool_calls`.

    Parameters
    ----------
    messages
        In the form of OpenAI and transformers: answers can have ``tool_calls``, results have the
        role ``"tool"``. They are normalised by :func:`ragkv.prompt.messages.normal_messages`.
    tools
        Each is ``{"type": "function", "function": {"name", "description", "parameters"}}``.
    tool_choice
        ``"auto"``: the model decides. ``"none"``: calls are not parsed, but the definitions stay in
        the prompt. ``"any"``, or the name of a tool: the answer is one call, by constrained
        decoding, which needs ``ragkv[structured]``. Forms of other libraries: None and False
        (``"auto"``), ``"required"`` and True (``"any"``), ``{"type", "name"}``, and OpenAI's
        objects: a function, or ``allowed_tools``, which limits the calls and leaves all
        definitions in the prompt.
    parallel_tool_calls
        False: generation ends after the first call.
    chat_template_kwargs
        Variables of the chat template, such as ``{"enable_thinking": False}``.

    Raises
    ------
    ConfigError
        A message, a tool, the choice or a variable is wrong.
    """

    def __init__(
        self,
        messages: Iterable[Message],
        tools: Iterable[Mapping[str, Any]] | None = (),
        tool_choice: object = "auto",
        *,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_bool("parallel_tool_calls", parallel_tool_calls)
        self._messages = normal_messages(messages)
        self.chat_template_kwargs = checked_variables(chat_template_kwargs)
        tools = () if tools is None else tools
        if not isinstance(tools, Iterable):
            raise ConfigError(f"tools must be a list of tools, not {tools!r}")
        self.tools = tuple(_checked(tool) for tool in tools)
        self.allowed_tools: frozenset[str] | None = None
        if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
            tool_choice, self.allowed_tools = _allowed(tool_choice, self.tools)
        self.tool_choice = choice = _word_of(tool_choice)
        self.parallel_tool_calls = parallel_tool_calls
        names = [tool["function"]["name"] for tool in self.tools]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"tools: two have the name {min(twice)!r}")
        if choice not in {*CHOICES, *names}:
            raise ConfigError(
                f"tool_choice must be one of {', '.join([*_WORDS, *names])}, not {tool_choice!r}"
            )
        if choice == "any" and not names:
            raise ConfigError(f"tool_choice {tool_choice!r} needs a tool")

    @property
    def reads_calls(self) -> bool:
        """Whether calls are parsed from the answer."""
        return bool(self.tools) and self.tool_choice != "none"

    def may_call(self, name: str) -> bool:
        """Return whether the tool is allowed."""
        return self.allowed_tools is None or name in self.allowed_tools

    @property
    def has_to_call(self) -> bool:
        """Whether the answer has to be one call."""
        return self.tool_choice not in ("auto", "none")

    @property
    def forced_schema(self) -> dict[str, Any] | None:
        """The JSON schema of a required call; None if no call is required."""
        if not self.has_to_call:
            return None
        calls = self.call_schemas
        return calls[0] if len(calls) == 1 else {"anyOf": calls}

    @property
    def call_schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the allowed calls."""
        functions = [tool["function"] for tool in self.tools]
        functions = [each for each in functions if self.may_call(each["name"])]
        named = [each for each in functions if each["name"] == self.tool_choice]
        return [_schema_of(function) for function in named or functions]

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | Sequence[Message]:
        """Return messages, without the tools."""
        return self._messages[index]


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt of exactly these tokens, without tokenisation or added tokens.

    Raises
    ------
    ConfigError
        A token id is not an integer from 0 to 2**31 - 1.
    """

    ids: Sequence[int]

    def __post_init__(self) -> None:
        if not all(type(token) is int and 0 <= token < 2**31 for token in self.ids):
            raise ConfigError("a prompt's token ids must be integers from 0 to 2147483647")

    def __len__(self) -> int:
        return len(self.ids)


def _word_of(tool_choice: object) -> str:
    """Return one of ``CHOICES``, or a tool's name."""
    match tool_choice:
        case None | False:
            return "auto"
        case True | "required":
            return "any"
        case str():
            return tool_choice
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
        case {"type": ("auto" | "none" | "any") as word}:
            return str(word)
    raise ConfigError(
        f"tool_choice must be 'auto', 'none', 'required' or a tool's name, not {tool_choice!r}"
    )


def _allowed(
    tool_choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[object, frozenset[str]]:
    """Return the mode of OpenAI's ``allowed_tools``, and the names of its tools."""
    match tool_choice.get("allowed_tools", tool_choice):
        case {"mode": ("auto" | "required") as mode, "tools": [*listed]}:
            names = [_word_of(each) for each in listed]
        case _:
            raise ConfigError(
                "allowed_tools must have a mode, 'auto' or 'required', and tools, not "
                f"{tool_choice!r}"
            )
    known = {tool["function"]["name"] for tool in tools}
    if not names:
        raise ConfigError("allowed_tools must have a tool")
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"allowed_tools names {', '.join(unknown)}, which is none of the tools")
    return mode, frozenset(names)


def _schema_of(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function.get("parameters") or {"properties": {}}
    own = {DOCUMENT: f"tool {function['name']!r}", "strict": function.get("strict") is True}
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": {**given, "type": "object", **own},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _checked(tool: object) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            "a tool must be {'type': 'function', 'function': {'name', 'description', "
            f"'parameters'}}, not {tool!r}"
        )
    if not function["name"].strip():
        raise ConfigError(f"a tool must have a name, not {function['name']!r}")
    given = function.get("parameters")
    kind = given.get("type", "object") if isinstance(given, Mapping) else given
    if given is not None and "object" not in (kind if isinstance(kind, list) else [kind]):
        raise ConfigError(
            f"the parameters of {function['name']!r} must be a JSON schema, a dict, of the type "
            f"'object', not {kind!r}"
        )
    check_json(f"the definition of {function['name']!r}", tool)
    return {"type": "function", **tool}  # type: ignore[dict-item]


def prompt_of(
    prompt: str | Sequence[Message] | TokenIds,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str | Chat | TokenIds:
    """Return messages as a chat with these template variables; texts and token ids unchanged.

    Raises
    ------
    ConfigError
        A message or a variable is wrong, or a text or token ids have variables.
    """
    if isinstance(prompt, Chat):
        if not chat_template_kwargs:
            return prompt
        chat = copy.copy(prompt)
        given = checked_variables(chat_template_kwargs)
        chat.chat_template_kwargs = {**prompt.chat_template_kwargs, **given}
        return chat
    if not isinstance(prompt, str | TokenIds):
        return Chat(prompt, chat_template_kwargs=chat_template_kwargs)
    if chat_template_kwargs:
        kind = "a text" if isinstance(prompt, str) else "token ids, no text"
        raise ConfigError(f"chat_template_kwargs are for chat messages, and the prompt is {kind}")
    return prompt
