"""From LlamaIndex's messages and templates to the text that the model reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.llms.ragkv.tools import tool_blocks

from ragkv.answer.engine import Engine
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from llama_index.llms.ragkv.base import RagKVLLM

_CONTEXT = ("context_str", "context", "context_msg")
_CALL = ("query_str", "existing_answer")
_MARK = "\ue000"
_CONTEXT_MARK = "\ue001"
_ANY_MARK = re.compile(f"[{_MARK}{_CONTEXT_MARK}]")
_ROLES = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
    MessageRole.DEVELOPER: "system",
}
"""Roles that chat templates know by another name."""
_NOT_TEXT = ("image", "audio", "video", "document", "citable")


def template_head(template: BasePromptTemplate | str, llm: RagKVLLM) -> str:
    """Return the text that ``llm`` writes before the first one that changes from call to call.

    That is the context, or the query where it comes first, or the result of a function in
    ``function_mappings``, such as a date. Fields filled by ``partial_format`` are text. System
    prompt, query wrapper and ``completion_to_prompt`` (or, for a chat model, the chat template)
    are included, as in a query engine's prompts.

    Parameters
    ----------
    template
        A text QA template with a ``{context_str}`` field; ``"default"`` is the query engines'
        default. Any other string is a template's text.

    Raises
    ------
    ConfigError
        The template has no field for the context.
    """
    if isinstance(template, str):
        is_default = template == "default"
        template = DEFAULT_TEXT_QA_PROMPT_SEL if is_default else PromptTemplate(template)
    values = dict.fromkeys(_CALL, _MARK) | dict.fromkeys(_CONTEXT, _CONTEXT_MARK)
    template = _marked(template)
    messages: list[dict[str, Any]] = []
    if llm.uses_chat_template:
        messages = as_dicts(llm.template_messages(template, **values))
        rendered = "".join(each["content"] for each in messages)
    else:
        rendered = llm.render_template(template, **values)
    if _CONTEXT_MARK not in rendered:
        raise ConfigError(
            "sink_from needs a template that writes its field {context_str} verbatim; the fields "
            f"of this one: {', '.join(template.template_vars) or 'none'}"
        )
    if messages:
        fields = [{**each, "content": _fields(each["content"])} for each in messages]
        return llm.kv.sink_from(fields, chat_template_kwargs=llm.chat_template_kwargs)
    return _ANY_MARK.split(rendered, maxsplit=1)[0]


def _fields(text: str) -> str:
    """Write marks as fields of a format string, and all other braces as plain text."""
    return _ANY_MARK.sub("{field}", text.replace("{", "{{").replace("}", "}}"))


def _marked(template: BasePromptTemplate) -> BasePromptTemplate:
    """Replace a template's functions, whose text may change from call to call, by marks."""
    functions = getattr(template, "function_mappings", None) or {}
    changing = [name for name in functions if name not in _CONTEXT]
    if not changing:
        return template
    marked = {**functions, **dict.fromkeys(changing, lambda **_: _MARK)}
    return template.model_copy(update={"function_mappings": marked})


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
    """Return a template from its text, or from what ``to_dict`` wrote of it."""
    text = given["template"] if isinstance(given, dict) else given
    return PromptTemplate(text) if isinstance(text, str) else text


def render_messages(
    messages: Sequence[ChatMessage],
    kv: Engine,
    chat_template_kwargs: Mapping[str, Any],
) -> str:
    """Return messages as the model reads them, without a chat template in LlamaIndex's form.

    Raises
    ------
    ConfigError
        The chat template is a server's.
    """
    if not kv.info.has_chat_template:
        return generic_messages(messages)
    return kv.render(as_dicts(messages), chat_template_kwargs)
