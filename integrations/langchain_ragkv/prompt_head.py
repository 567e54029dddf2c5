"""The head that every prompt of a LangChain template shares: the text to encode chunks behind."""

from __future__ import annotations

import re
from typing import Any

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.prompts import BasePromptTemplate

from langchain_ragkv.messages import convert_messages
from ragkv import RagKV
from ragkv.errors import ConfigError

_MARK = "\ue000{name}\ue000"
_FIELD = re.compile("\ue000[^\ue000]+\ue000")


def prompt_head(template: BasePromptTemplate[Any], kv: RagKV, *, chat: bool) -> str:
    """Return what the template puts before its first unfilled variable.

    That is the variable of the documents, or one that stands before it: the text
    behind a variable changes from call to call. Variables that are the same in
    every call belong into ``template.partial(...)``; those that a function fills there, such as
    a date, count as variables.

    Parameters
    ----------
    chat
        Whether the prompt is given to the model as messages, through the chat
        template, or as one string.

    Raises
    ------
    ConfigError
        The template is not a LangChain prompt template, has no variable, or has one that it
        does not write as it is, so that nobody can say where the head ends.
    """
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
    lost = [name for name in names if _MARK.format(name=name) not in text]
    if lost:
        raise ConfigError(
            f"sink_from: the template does not write {', '.join(lost)} as it is (a loop, a "
            "condition or a filter?): give its head as kv=RagKV(..., reuse=ReuseConfig(sink=...))"
        )
    if not chat:
        return kv.sink_from(_fields(text))
    messages = convert_messages(prompt.to_messages())
    return kv.sink_from([{**each, "content": _fields(each["content"])} for each in messages])


def _stand_in(template: BasePromptTemplate[Any], name: str) -> str | list[BaseMessage]:
    """Return a value that can be found again: text, or a message where messages are wanted."""
    wants_messages = "list" in str(template.input_types.get(name, str)).lower()
    mark = _MARK.format(name=name)
    return [HumanMessage(mark)] if wants_messages else mark


def _fields(text: str) -> str:
    """Write marks as fields of a format string, and all other braces as plain text."""
    return _FIELD.sub("{field}", text.replace("{", "{{").replace("}", "}}"))
