"""ChatRagKV: a chat model that answers from precomputed chunk caches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, ClassVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import BaseModel

from langchain_ragkv.call import Call
from langchain_ragkv.model import ChunkReuse
from langchain_ragkv.prompts import convert_messages
from langchain_ragkv.structured import structured
from langchain_ragkv.tools import call_chunks, calls, definitions, repeated_cut_off
from ragkv import Chat, Completion
from ragkv.answer.stream import TextStream


class ChatRagKV(ChunkReuse, BaseChatModel):
    """Chat model over precomputed chunk caches: takes ``ChatHuggingFace``'s place.

    Without arguments it serves the embedded default model. Give ``model_id``, or an
    engine (``kv``), or the address of a ``ragkv serve`` (``base_url``), which then has the model
    and the store; :meth:`from_model_id` takes HuggingFacePipeline's keywords.
    A call can override every setting, including the engine's reuse settings:
    ``invoke(messages, recompute_ratio=0.1)``, ``bind(method="query")``.

    Answers carry ``usage_metadata`` (with ``cache_read``) and, in
    ``response_metadata["ragkv"]``, how many of the prompt's tokens came from where, by chunk,
    the misses, times and warnings of :class:`ragkv.ReuseReport`, without the chunks' texts;
    ``last_report`` is the whole report.
    """

    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template, such as ``{"enable_thinking": False}``; those of a
    call are put on top."""

    _chat: ClassVar[bool] = True

    def bind(self, **kwargs: Any) -> Any:
        """Give keywords to every call; one that is wrong is refused now."""
        self._read(kwargs)
        return super().bind(**kwargs)

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: Any = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools.

        Parameters
        ----------
        tools
            Tools, functions, pydantic classes, or OpenAI's definitions.
        tool_choice
            ``"auto"`` or None: the model decides; ``"none"``; ``"any"``, ``"required"`` or True:
            it calls one; a tool's name, or OpenAI's dict with one: it calls that.
        strict
            Whether a parameter's schema that cannot be enforced whole is an error.
        **kwargs
            Of calls: ``parallel_tool_calls=False`` for one call at most, ``response_format`` for
            the form of answers, and all settings.
        """
        found = definitions(tools, strict=strict)
        bound: Runnable[LanguageModelInput, AIMessage] = self.bind(
            tools=found, tool_choice=tool_choice, **kwargs
        )
        return bound

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Let the model answer by objects of a schema, by constrained decoding.

        Parameters
        ----------
        schema
            A pydantic class, a TypedDict, a JSON schema, or OpenAI's definition of a tool.
        method
            ``"json_schema"``; ``"function_calling"``: the object is the arguments of a call;
            ``"json_mode"``: any JSON object, which is then parsed by the schema.
        include_raw
            Whether the outcome is ``{"raw", "parsed", "parsing_error"}``.
        **kwargs
            Settings of the calls. ``strict=True`` refuses a schema with unenforceable keywords;
            by default they are ignored.
        """
        return structured(self, schema, method, kwargs, include_raw=include_raw)

    @property
    def _llm_type(self) -> str:
        return "ragkv-chat"

    def _begin(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, given: dict[str, Any]
    ) -> tuple[Call, Chat, TextStream]:
        call = self._call(stop, given)
        keywords = call.keywords
        prompt = Chat(
            convert_messages(messages),
            keywords.tools,
            keywords.tool_choice,
            parallel_tool_calls=keywords.parallel_tool_calls,
        )
        if prompt.has_to_call and (error := repeated_cut_off(messages)):
            raise error
        return call, prompt, call.start(prompt)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        call, prompt, stream = self._begin(messages, stop, kwargs)
        return _result(call, prompt, stream.whole())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        call, prompt, stream = self._begin(messages, stop, kwargs)
        return _result(call, prompt, await stream.awhole())

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call, prompt, stream = self._begin(messages, stop, kwargs)
        with stream:
            for piece in stream:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        yield _last_chunk(call, prompt, stream.completion)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call, prompt, stream = self._begin(messages, stop, kwargs)
        async with stream:
            async for piece in stream:
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        yield _last_chunk(call, prompt, stream.completion)


def _result(call: Call, prompt: Chat, completion: Completion) -> ChatResult:
    valid, invalid = calls(completion, prompt)
    message = AIMessage(
        content=completion.text,
        tool_calls=valid,
        invalid_tool_calls=invalid,
        **_account(call, completion),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def _last_chunk(call: Call, prompt: Chat, completion: Completion) -> ChatGenerationChunk:
    """Return the chunk that ends a stream: no text, but tool calls, usage and report."""
    message = AIMessageChunk(
        content="",
        chunk_position="last",
        tool_call_chunks=call_chunks(completion, prompt),
        **_account(call, completion),
    )
    return ChatGenerationChunk(message=message)


def _account(call: Call, completion: Completion) -> dict[str, Any]:
    usage, metadata = call.account(completion)
    return {
        "usage_metadata": usage,
        "response_metadata": metadata,
        "additional_kwargs": call.keywords.parsed(completion.text),
    }
