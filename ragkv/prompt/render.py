"""From a string or chat messages to the text that the model reads, and its head."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ragkv.errors import ConfigError
from ragkv.prompt.chat import Chat, TokenIds, prompt_of
from ragkv.prompt.fitting import TEMPLATE_ERRORS, fitted, shown_tools, with_definitions
from ragkv.prompt.messages import Message
from ragkv.prompt.tools.reader import writes_tools

Prompt = str | Sequence[Message] | TokenIds
"""A text, chat messages, or token ids."""
_MARK = "\ue000ragkv\ue000"
_MARKED = Chat([{"role": "user", "content": _MARK}])
_OPENING = 8
"""Characters that identify the head of a chat template."""
_DATE = "\ue000date\ue000"
_UNDATED = "{% macro strftime_now(format) %}" + _DATE + "{% endmacro %}"
"""Put before a chat template, it replaces the current date with a mark."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompt's text, and whether the tokenizer adds its special tokens to it."""

    text: str
    add_special_tokens: bool


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Render a prompt; tools of a :class:`ragkv.Chat` go through the chat template.

    A string is used verbatim; the tokenizer adds its special tokens unless the text begins with the
    BOS token. Messages go through the chat template, which writes the special tokens itself.

    Raises
    ------
    ConfigError
        The prompt has a different type, a message contains e.g. an image, the tokenizer has no chat
        template, or the template refuses the messages.
    """
    checked = prompt_of(prompt)
    if isinstance(checked, str):
        return Rendered(checked, not _starts_with_bos(checked, tokenizer))
    if isinstance(checked, TokenIds):
        text = tokenizer.decode(list(checked.ids), clean_up_tokenization_spaces=False)
        return Rendered(str(text), add_special_tokens=False)
    if not checked:
        raise ConfigError("the prompt has no message")
    return Rendered(_apply_template(checked, tokenizer), add_special_tokens=False)


def chat_head(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template's text before the first user message (the sink "auto").

    Without a chat template, this is the BOS token if the tokenizer adds one. The text ends before
    the current date if the template writes it, so that chunks are reusable on other days.
    """
    if not tokenizer.chat_template:
        bos = tokenizer.bos_token_id
        begins = bos is not None and list(tokenizer("The")["input_ids"])[:1] == [bos]
        return str(tokenizer.bos_token) if begins else ""
    return _until_mark(_MARKED, tokenizer)[0]


def render_sink(text: str, tokenizer: PreTrainedTokenizerBase) -> Rendered:
    """Render the sink with the special tokens of a prompt that begins with it.

    The head of a chat template contains them; for other text the tokenizer adds its own.
    """
    plain = bool(text) and not _starts_with_bos(text, tokenizer)
    if plain and tokenizer.chat_template:
        plain = not text.startswith(chat_head(tokenizer)[:_OPENING] or "\0")
    return Rendered(text, add_special_tokens=plain)


def template_head(
    template: str | Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return a prompt template's text before its first ``{field}``.

    Messages are rendered through the chat template, with the tools and its variables, up to the
    field or the current date.
    """
    if isinstance(template, str):
        return _until_field(template)[0]
    messages: list[Message] = []
    role, found = "", False
    for message in Chat(template):
        role = message["role"]
        text, found = _until_field(message["content"])
        messages.append({**message, "content": text + _MARK if found else text})
        if found:
            break
    if not found or role == "system":  # some templates write it into the user's
        messages += _MARKED
    chat = Chat(messages, tools, chat_template_kwargs=chat_template_kwargs)
    return _until_mark(chat, tokenizer)[0]


def undated(sink: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Cut a sink that begins with the chat template's head before the current date."""
    if not _writes_date(tokenizer):
        return sink
    head, dated = _until_mark(_MARKED, tokenizer)
    return head if dated and head and sink.startswith(head) else sink


def _writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.chat_template) and "strftime_now" in tokenizer.get_chat_template()


def _until_mark(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> tuple[str, bool]:
    """Return the text before the mark or the date, and whether it ends at the date."""
    given = {}
    if _writes_date(tokenizer):
        given["chat_template"] = _UNDATED + tokenizer.get_chat_template()
    text = _apply_template(chat, tokenizer, **given).partition(_MARK)[0]
    head, dated, _ = text.partition(_DATE)
    return (head.rstrip() if dated else head), bool(dated)


def _until_field(template: str) -> tuple[str, bool]:
    """Return the literal text before the first field, and whether there is a field.

    A text that is not a format string, e.g. one that contains JSON, is literal.
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


def _apply_template(chat: Chat, tokenizer: PreTrainedTokenizerBase, **given: Any) -> str:
    if not tokenizer.chat_template:
        raise ConfigError(
            "This tokenizer has no chat template: give the prompt as a string, or set "
            "tokenizer.chat_template."
        )
    messages: Sequence[Message] = chat
    given |= {"tokenize": False, "add_generation_prompt": True, **chat.chat_template_kwargs}
    try:
        takes_tools = bool(chat.tools) and writes_tools(tokenizer)
        if takes_tools:
            given["tools"] = shown_tools(chat.tools)
        elif chat.tools:
            messages = with_definitions(chat, shown_tools(chat.tools))
        plain: Any = fitted(messages, tokenizer, tools=takes_tools)
        return str(tokenizer.apply_chat_template(plain, **given))
    except TEMPLATE_ERRORS as error:
        raise ConfigError(f"the chat template does not accept these messages: {error}") from error


def _starts_with_bos(text: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
