"""How RagKVLLM writes prompts: texts as they are, messages through the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.llms.ragkv.prompts import as_dicts, render_messages

from ragkv import Chat
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from ragkv.answer.engine import Engine

Prompt = str | Chat


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
            messages = self.template_messages(template, **values)
            return str((self.messages_to_prompt or self._messages_to_prompt)(messages))
        return self._get_prompt(template, **values)

    def template_messages(self, template: BasePromptTemplate, **values: str) -> list[ChatMessage]:
        """Return the messages that ``predict`` would give a chat model for a template."""
        return self._get_messages(template, **values)

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
        return str((self.messages_to_prompt or self._messages_to_prompt)(messages))

    def _leaves_template_to_model(self) -> bool:
        own = self.messages_to_prompt or self._messages_to_prompt
        return own == self._usual_functions[1] and self.kv.info.has_chat_template

    def _messages_to_prompt(self, messages: Sequence[ChatMessage]) -> str:
        return render_messages(messages, self.kv, self.chat_template_kwargs)
