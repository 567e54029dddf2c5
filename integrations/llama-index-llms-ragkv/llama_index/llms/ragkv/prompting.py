"""How RagKVLLM writes prompts: texts as they are, messages through the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.llms.ragkv.prompts import as_dicts

from ragkv import Chat
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from ragkv.answer.engine import Engine

Prompt = str | Chat
_CONTEXT = ("context_str", "context", "context_msg")
_CALL = ("query_str", "existing_answer")
_MARK, _CONTEXT_MARK = "\ue000", "\ue001"
_ANY_MARK = re.compile(f"[{_MARK}{_CONTEXT_MARK}]")


class Prompting(LLM):
    """The part of RagKVLLM that makes prompts of texts, messages and templates."""

    query_wrapper_prompt: PromptTemplate = Field(default=PromptTemplate("{query_str}"))
    is_chat_model: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    _usual_functions: tuple[Any, Any] = PrivateAttr(default=(None, None))

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...

        @property
        def kv(self) -> Engine:
            """The engine, or the client of a server."""

    def render_template(self, template: BasePromptTemplate, **values: str) -> str:
        """Return the text that ``predict`` would give the model for a template."""
        if self.is_chat_model:
            return self._as_text(self._get_messages(template, **values))
        return self._get_prompt(template, **values)

    @property
    def uses_chat_template(self) -> bool:
        """Whether templates reach the model as messages, through its own chat template."""
        return self.is_chat_model and self._leaves_template_to_model()

    def _rendered(self, prompt: str, *, formatted: bool) -> str:
        if formatted:
            return prompt
        text = self.query_wrapper_prompt.format(query_str=prompt)
        own = self.completion_to_prompt
        if own and own != self._usual_functions[0]:
            return str(own(text))
        return f"{self.system_prompt} {text}" if self.system_prompt else text

    def _chat_prompt(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> Prompt:
        """Leave the chat template to the engine, which tokenises once."""
        tools = kwargs.pop("tools", None) or ()
        choice = kwargs.pop("tool_choice", None)
        given: dict[str, Any] = {
            "parallel_tool_calls": kwargs.pop("parallel_tool_calls", None) is not False,
            "chat_template_kwargs": self.chat_template_kwargs,  # a call's own are put on top
        }
        if self._leaves_template_to_model():
            return Chat(as_dicts(messages), tools, choice, **given)
        if tools:
            raise ConfigError("tools go through the model's chat template: omit messages_to_prompt")
        return self._as_text(messages)

    def _as_text(self, messages: Sequence[ChatMessage]) -> str:
        return str((self.messages_to_prompt or self._messages_to_prompt)(messages))

    def _leaves_template_to_model(self) -> bool:
        own = self.messages_to_prompt or self._messages_to_prompt
        return own == self._usual_functions[1] and self.kv.info.has_chat_template

    def _messages_to_prompt(self, messages: Sequence[ChatMessage]) -> str:
        if not self.kv.info.has_chat_template:
            return generic_messages(messages)
        return self.kv.render(as_dicts(messages), self.chat_template_kwargs)

    def _head_of(self, template: BasePromptTemplate | str) -> str:
        """Return the text that is written before the first one that changes from call to call.

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
        if self.uses_chat_template:
            messages = as_dicts(self._get_messages(template, **values))
            rendered = "".join(each["content"] for each in messages)
        else:
            rendered = self.render_template(template, **values)
        if _CONTEXT_MARK not in rendered:
            raise ConfigError(
                "sink_from needs a template that writes its field {context_str} verbatim; the "
                f"fields of this one: {', '.join(template.template_vars) or 'none'}"
            )
        if messages:
            fields = [{**each, "content": _fields(each["content"])} for each in messages]
            return self.kv.sink_from(fields, chat_template_kwargs=self.chat_template_kwargs)
        return _ANY_MARK.split(rendered, maxsplit=1)[0]


def _fields(text: str) -> str:
    """Write marks as fields of a format string, and all other braces as plain text."""
    return _ANY_MARK.sub("{field}", text.replace("{", "{{").replace("}", "}}"))


def _marked(template: BasePromptTemplate) -> BasePromptTemplate:
    """Replace a template's functions, whose text can change from call to call, by marks."""
    functions = getattr(template, "function_mappings", None) or {}
    changing = [name for name in functions if name not in _CONTEXT]
    if not changing:
        return template
    marked = {**functions, **dict.fromkeys(changing, lambda **_: _MARK)}
    return template.model_copy(update={"function_mappings": marked})
