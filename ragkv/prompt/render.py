"""From a string or chat messages to the text that the model reads, and its head."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ragkv.errors import ConfigError
from ragkv.prompt.chat import Chat, Message
from ragkv.prompt.tools.describe import with_definitions
from ragkv.prompt.tools.reader import writes_tools

Prompt = str | Sequence[Message]
_MARK = "\ue000ragkv\ue000"
_MARKED = {"role": "user", "content": _MARK}
_OPENING = 8
"""Characters by which the head of a chat template is known."""
_DATE = "\ue000date\ue000"
_UNDATED = "{% macro strftime_now(format) %}" + _DATE + "{% endmacro %}"
"""Before a chat template, has it write a mark instead of the day's date."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompt's text, and whether the tokenizer adds its special tokens to it."""

    text: str
    add_special_tokens: bool


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Render a prompt; tools of a :class:`ragkv.Chat` go through the chat template.

    A string is taken verbatim; special tokens are added as the tokenizer does by
    default, unless the text begins with the BOS token already. Messages go through
    the chat template, which writes the special tokens itself.

    Raises
    ------
    ConfigError
        The prompt is neither, a message holds an image or the like, the tokenizer has no chat
        template, or it refuses the messages (two users in a row, a system message).
    """
    if isinstance(prompt, str):
        return Rendered(prompt, not _starts_with_bos(prompt, tokenizer))
    messages: Sequence[Message] = prompt
    _check_messages(messages)
    if not messages:
        raise ConfigError("the prompt has no message")
    for part in (part for message in messages for part in _parts(message["content"])):
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            raise ConfigError(
                f"a message's content of type {part['type']!r} is not read: give its text"
            )
    tools = prompt.tools if isinstance(prompt, Chat) else ()
    return Rendered(_apply_template(messages, tokenizer, tools), add_special_tokens=False)


def _check_messages(messages: object) -> None:
    if not isinstance(messages, Sequence) or not all(
        isinstance(message, Mapping) and "role" in message and "content" in message
        for message in messages
    ):
        raise ConfigError("prompt must be a string or a list of {'role', 'content'} messages")


def _parts(content: object) -> Sequence[object]:
    return content if isinstance(content, list | tuple) else ()


def chat_head(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the chat template puts before the first user text (the sink "auto").

    Without a chat template it is the BOS token, where the tokenizer puts one before a text. Where
    the template writes the day's date, it ends before that: chunks are to serve on other days, too.
    """
    if not tokenizer.chat_template:
        bos = tokenizer.bos_token_id
        begins = bos is not None and list(tokenizer("The")["input_ids"])[:1] == [bos]
        return str(tokenizer.bos_token) if begins else ""
    return _until_mark([_MARKED], tokenizer)[0]


def render_sink(text: str, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Give the sink the special tokens that a prompt beginning with it gets.

    The head of a chat template holds them already; in front of other text the
    tokenizer puts its own. No text is no sink.
    """
    plain = bool(text) and not _starts_with_bos(text, tokenizer)
    if plain and tokenizer.chat_template:
        plain = not text.startswith(chat_head(tokenizer)[:_OPENING] or "\0")
    return Rendered(text, add_special_tokens=plain)


def template_head(
    template: str | Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return what a prompt template puts before its first ``{field}``.

    For a string that is the text up to the field; messages are rendered through the
    chat template, with the tools, up to it, or to the day's date.
    """
    if isinstance(template, str):
        return _until_field(template)[0]
    _check_messages(template)
    tools = Chat((), tools).tools
    messages: list[dict[str, Any]] = []
    for message in template:
        text, found = _until_field(str(message["content"]))
        if found:
            messages.append({**message, "content": text + _MARK})
            break
        messages.append({**message, "content": text})
    else:
        messages.append(_MARKED)
    return _until_mark(messages, tokenizer, tools)[0]


def undated(sink: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Cut a sink that begins as the chat template does where that writes the day's date."""
    if not _writes_date(tokenizer):
        return sink
    head, dated = _until_mark([_MARKED], tokenizer)
    return head if dated and head and sink.startswith(head) else sink


def _writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.chat_template) and "strftime_now" in tokenizer.get_chat_template()


def _until_mark(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[str, bool]:
    """Return what stands before the mark on any day, and whether a date has cut it short."""
    given = {}
    if _writes_date(tokenizer):
        given["chat_template"] = _UNDATED + tokenizer.get_chat_template()
    text = _apply_template(messages, tokenizer, tools, **given).partition(_MARK)[0]
    head, dated, _ = text.partition(_DATE)
    return (head.rstrip() if dated else head), bool(dated)


def _until_field(template: str) -> tuple[str, bool]:
    """Return the literal text before the first field, and whether there is a field.

    A text that is no format string, such as one with JSON in it, is literal.
    """
    head = ""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError:
        return template, False
    for literal, field, _, _ in parts:
        head += literal
        if field is not None:
            return head, True
    return head, False


def _apply_template(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] = (),
    **given: Any,
) -> str:
    if not tokenizer.chat_template:
        raise ConfigError(
            "This tokenizer has no chat template: give the prompt as a string, or set "
            "tokenizer.chat_template."
        )
    plain = [dict(message) for message in messages]
    if tools and writes_tools(tokenizer):
        given["tools"] = [dict(tool) for tool in tools]
    elif tools:
        plain = with_definitions(plain, tools)
    try:
        return str(
            tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True, **given
            )
        )
    except TemplateError as error:
        raise ConfigError(f"the chat template does not take these messages: {error}") from error


def _starts_with_bos(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
