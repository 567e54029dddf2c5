"""From LangChain's messages and templates to the text that the model reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, PromptTemplate

from ragkv import Chat
from ragkv.answer.engine import Engine
from ragkv.errors import ConfigError

_ROLES: dict[type[BaseMessage], str] = {
    SystemMessage: "system",
    HumanMessage: "user",
    AIMessage: "assistant",
    ToolMessage: "tool",
}
_MARK = "\ue000{name}\ue000"
_FIELD = re.compile("\ue000[^\ue000]+\ue000")


def convert_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return ``{"role", "content"}`` messages, tool calls in transformers' form.

    Raises
    ------
    ConfigError
        There is no message, or one has an image, audio or a file.
    """
    if not messages:
        raise ConfigError("At least one message is needed.")
    answered = {each.tool_call_id for each in messages if isinstance(each, ToolMessage)}
    return [dict(each) for each in Chat(_convert(message, answered) for message in messages)]


def _convert(message: BaseMessage, answered: AbstractSet[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"role": _role(message), "content": _parts(message.content)}
    if isinstance(message, AIMessage):
        calls = [(call["id"], call["name"], call["args"]) for call in message.tool_calls]
        # agents answer an invalid call by a result with the error
        calls += [
            (call["id"], call["name"] or "unknown", {})
            for call in message.invalid_tool_calls
            if call["id"] in answered
        ]
        out["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
            for call_id, name, given in calls
        ]
    if isinstance(message, ToolMessage):
        out |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return {name: value for name, value in out.items() if value or name == "content"}


def _parts(content: str | list[Any]) -> Any:
    """Return content whose parts have types, as the core reads them."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]


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


def prompt_head(
    template: BasePromptTemplate[Any] | str,
    kv: Engine,
    tools: Sequence[dict[str, Any]],
    chat_template_kwargs: Mapping[str, Any],
    *,
    chat: bool,
) -> str:
    """Return the text that a template has before its first unfilled variable.

    That is the variable of the documents, or one before it: the text behind a variable changes
    from call to call. Constant variables belong into ``template.partial(...)``; those that a
    function fills there, such as a date, count as variables.

    Parameters
    ----------
    template
        A string is the text of a prompt template, or of a chat's human message.
    tools, chat_template_kwargs
        Definitions, and variables of the chat template, that the head depends on; for chats.
    chat
        Whether the prompt is given to the model as messages, through the chat
        template, or as one string.

    Raises
    ------
    ConfigError
        The template is not a LangChain prompt template, has no variable, or does not write one
        verbatim, so that the end of the head is unknown.
    """
    if isinstance(template, str):
        kind: Any = ChatPromptTemplate if chat else PromptTemplate
        template = kind.from_template(template)
    if not isinstance(template, BasePromptTemplate):
        raise ConfigError(
            f"sink_from must be a LangChain prompt template, not {type(template).__name__}"
        )
    if not template.input_variables:
        raise ConfigError("sink_from has no variable for the documents, such as {context}.")
    changing = [name for name, value in template.partial_variables.items() if callable(value)]
    names = [*template.input_variables, *changing]
    prompt = template.format_prompt(**{name: _stand_in(template, name) for name in names})
    text = prompt.to_string()
    hidden = [name for name in names if _MARK.format(name=name) not in text]
    if hidden:
        raise ConfigError(
            f"sink_from: the template does not write {', '.join(hidden)} verbatim (a loop, a "
            "condition or a filter?): give its head as kv=RagKV(..., reuse=ReuseConfig(sink=...))"
        )
    if not chat:
        return kv.sink_from(_fields(text))
    messages = convert_messages(prompt.to_messages())
    fields = [{**each, "content": _fields(each["content"])} for each in messages]
    return kv.sink_from(fields, tools, chat_template_kwargs)


def _stand_in(template: BasePromptTemplate[Any], name: str) -> str | list[BaseMessage]:
    """Return a marked value: text, or a message where the variable takes messages."""
    wants_messages = "list" in str(template.input_types.get(name, str)).lower()
    mark = _MARK.format(name=name)
    return [HumanMessage(mark)] if wants_messages else mark


def _fields(text: str) -> str:
    """Write marks as fields of a format string, and all other braces as plain text."""
    return _FIELD.sub("{field}", text.replace("{", "{{").replace("}", "}}"))
