"""RagKVLLM: takes HuggingFaceLLM's place and answers from precomputed chunk caches."""

# ruff: noqa: FBT001, FBT002, PLR0917  the signatures are LlamaIndex's

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, SecretStr
from llama_index.core.callbacks import CallbackManager
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW, DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.types import BaseOutputParser, PydanticProgramMode
from llama_index.llms.ragkv.call import decode_arguments, window_of
from llama_index.llms.ragkv.engine import (
    LEFT_OUT,
    EngineSource,
    changed,
    given_values,
    one_device,
)
from llama_index.llms.ragkv.prompting import Prompt, Prompting
from llama_index.llms.ragkv.prompts import as_template
from llama_index.llms.ragkv.responses import Begin, aresponses, as_chat, as_completion, responses
from llama_index.llms.ragkv.serialisation import Serialisation
from llama_index.llms.ragkv.structured import StructuredPrediction
from llama_index.llms.ragkv.tools import ToolCalling

from ragkv import ReuseConfig
from ragkv.answer.engine import Engine, OverEngine
from ragkv.config import (
    DECODE_SETTINGS,
    STORE_SETTINGS,
    check_known,
    check_whole,
    checked_variables,
    with_store,
)
from ragkv.engine.settings import check_settings

_AS_GIVEN = (
    *("max_new_tokens", "callback_manager", "system_prompt", "completion_to_prompt"),
    *("pydantic_program_mode", "output_parser", "recompute_ratio", "method", "sink"),
    *("api_base", "timeout", "max_retries"),
)
"""Arguments that are fields as they come."""
_OF_REUSE = frozenset(ReuseConfig.__dataclass_fields__)
"""Settings that override the engine's."""


class RagKVLLM(OverEngine, Prompting, ToolCalling, StructuredPrediction, Serialisation, CustomLLM):
    """A local transformers model that reuses the KV caches of retrieved chunks.

    Takes every argument of ``llama_index.llms.huggingface.HuggingFaceLLM``, with the
    same meaning, and at ``recompute_ratio=1`` gives the same text. It differs where
    that class is at fault: streaming heeds ``completion_to_prompt`` too, ``complete``
    heeds ``system_prompt`` too, a prompt that begins with the BOS token gets no second
    one, per-call keyword arguments are heeded instead of dropped, a tokenizer without
    a chat template chats in LlamaIndex's generic form, images and documents in a chat
    are refused instead of left out, and the async methods do not block the event loop.

    Parameters
    ----------
    model_name
        Hub name, folder or GGUF file. None is the embedded SmolLM2-135M-Instruct.
    model, tokenizer
        Loaded objects, used instead of the names.
    tokenizer_outputs_to_remove
        Accepted, without effect: the engine takes only token ids.
    context_window
        Tokens of prompt and answer; None is the model's positions.
    device
        Where the model runs, as torch names it: a shorter ``device_map``.
    stopping_ids
        Tokens that end the answer, besides the model's own end-of-sequence tokens.
    recompute_ratio, method
        Overrides of ``reuse``; can be set on the object and given to each call.
    sink
        Text that chunks are encoded behind.
    sink_from
        The text QA template that the sink is taken from: a LlamaIndex template, its
        text, or ``"default"`` for the one that query engines use when given none. That
        is the default, too, unless ``sink``, a ``reuse`` with a sink, or ``kv`` is given.
    store, namespace, reuse, on_unsupported
        As in :class:`ragkv.RagKV`.
    kv
        An engine to use instead of making one. It brings its model, store and reuse settings:
        to give others beside it is an error.
    chat_template_kwargs
        Variables of the model's chat template, such as ``{"enable_thinking": False}``; those given
        to a call are put on top.
    api_base, api_key, timeout, max_retries
        Address of a ``ragkv serve``, which then has the model (called ``model_name``) and the
        store; the key of a namespace, or the environment's ``RAGKV_API_KEY``; the seconds after
        which an answer is given up (600), and how often a request is sent again (2).
    **more
        Further fields of :class:`ragkv.ReuseConfig` and :class:`ragkv.DecodeConfig`, and those of
        a :class:`ragkv.StoreConfig`, such as ``codec``, instead of one.

    Raises
    ------
    UnsupportedModelError
        The model's caches cannot be reused and ``on_unsupported`` is ``"raise"``.
    ConfigError
        A setting is wrong.

    Notes
    -----
    ``CompletionResponse.additional_kwargs`` and ``ChatResponse.additional_kwargs`` are
    the answer's :class:`ragkv.ReuseReport` as a dict; ``raw`` holds it as ``report``,
    beside ``token_ids`` and ``usage``. A stream's last response carries them.
    """

    model_name: str = Field(default="", description="Hub name, folder or GGUF file of the model.")
    tokenizer_name: str = Field(default="", description="Hub name or folder of the tokenizer.")
    context_window: int = Field(default=DEFAULT_CONTEXT_WINDOW, gt=0)
    max_new_tokens: int = Field(default=DEFAULT_NUM_OUTPUTS, gt=0)
    system_prompt: str = Field(default="", description="Put before every prompt.")
    stopping_ids: list[int] = Field(default_factory=list)
    generate_kwargs: dict[str, Any] = Field(default_factory=dict)
    recompute_ratio: float | Literal["auto"] | None = None
    method: str | None = None
    sink: str | None = Field(default=None, description="Text that chunks are encoded behind.")
    api_base: str | None = Field(default=None, description="Address of a ragkv server.")
    timeout: float | None = Field(default=None, gt=0)
    max_retries: int | None = Field(default=None, ge=0)
    settings: dict[str, Any] = Field(default_factory=dict)

    _source: EngineSource = PrivateAttr()

    def __init__(
        self,
        context_window: int | None = None,
        max_new_tokens: int = DEFAULT_NUM_OUTPUTS,
        query_wrapper_prompt: str | PromptTemplate | dict[str, Any] = "{query_str}",
        tokenizer_name: str | None = None,
        model_name: str | None = None,
        model: Any | None = None,
        tokenizer: Any | None = None,
        device_map: Any | None = "auto",
        stopping_ids: list[int] | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
        tokenizer_outputs_to_remove: list[str] | None = None,
        model_kwargs: dict[str, Any] | None = None,
        generate_kwargs: dict[str, Any] | None = None,
        is_chat_model: bool | None = False,
        callback_manager: CallbackManager | None = None,
        system_prompt: str = "",
        messages_to_prompt: Callable[[Sequence[ChatMessage]], str] | None = None,
        completion_to_prompt: Callable[[str], str] | None = None,
        pydantic_program_mode: PydanticProgramMode = PydanticProgramMode.DEFAULT,
        output_parser: BaseOutputParser | None = None,
        *,
        recompute_ratio: float | Literal["auto"] | None = None,
        method: str | None = None,
        sink: str | None = None,
        sink_from: BasePromptTemplate | str | None = None,
        store: Any = None,
        namespace: str = "default",
        reuse: ReuseConfig | None = None,
        on_unsupported: Literal["raise", "full"] = "raise",
        kv: Engine | None = None,
        device: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        api_base: str | None = None,
        api_key: str | SecretStr | None = None,
        timeout: float | None = None,
        max_retries: int | None = None,
        **more: Any,
    ) -> None:
        given = dict(locals())
        known = RagKVLLM.__init__.__annotations__.keys() - {"return", "more"}
        more = {**more.pop("settings", {}), **more}
        check_known("argument", more, {*known, *STORE_SETTINGS, *_OF_REUSE, *DECODE_SETTINGS})
        own = with_store({"store": store, **more})
        given["store"] = store = own.pop("store")
        given["device_map"] = one_device(device, device_map)
        if context_window is not None:
            check_whole("context_window", context_window, 1, 2**60)
        decode = decode_arguments(
            generate_kwargs or {},
            {"stop_token_ids": stopping_ids},
            max_new_tokens=max_new_tokens,
            generation_config=None,
        )
        overrides = _part(own, _OF_REUSE)
        check_settings(
            reuse if kv is None else kv.reuse,
            given_values(recompute_ratio=recompute_ratio, method=method, sink=sink, **overrides),
            store=store,
            namespace=namespace,
            decode={**decode, **_part(own, DECODE_SETTINGS)},
            model=None if api_base else model_name,
            device=device,
        )
        source = EngineSource.of(kv, given)
        engine = source.get()
        info = engine.info
        if sink is None and sink_from is None and kv is None and source.reuse.sink == "auto":
            sink_from = "default"
        super().__init__(
            **{name: given[name] for name in _AS_GIVEN},
            context_window=window_of(context_window, info.positions),
            query_wrapper_prompt=as_template(query_wrapper_prompt),
            tokenizer_name="" if api_base else tokenizer_name or model_name or info.name,
            model_name=model_name or info.name,
            stopping_ids=stopping_ids or [],
            generate_kwargs=generate_kwargs or {},
            is_chat_model=bool(is_chat_model),
            messages_to_prompt=messages_to_prompt or self._messages_to_prompt,
            chat_template_kwargs=checked_variables(chat_template_kwargs),
            settings=own,
        )
        self._source = source
        self._left_out = changed(given, LEFT_OUT)
        self._usual_functions = (
            None if completion_to_prompt else self.completion_to_prompt,
            None if messages_to_prompt else self.messages_to_prompt,
        )
        if sink_from is not None and sink is None:
            self.sink = self._head_of(sink_from)
        source.reuse = engine.reuse.override(**self.reuse_overrides)
        if kv is None:
            engine.reuse = source.reuse
        self._arguments({})  # a wrong setting is said now, not by the first answer

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex writes into serialised pipelines."""
        return "RagKV_LLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Properties of the model for LlamaIndex."""
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.max_new_tokens,
            model_name=self.model_name,
            is_chat_model=self.is_chat_model,
            is_function_calling_model=self.uses_chat_template,
        )

    @property
    def kv(self) -> Engine:
        """The engine underneath, or the client of the server."""
        return self._source.get()

    def _engine(self) -> Engine:
        return self.kv

    @property
    def source(self) -> EngineSource:
        """The specification that worker processes make the engine from."""
        return self._source

    def prefetch(self, texts: Sequence[str], *, for_next_answer: bool = True) -> None:
        """Name retrieved chunks: they start loading, and missing ones are stored."""
        self.kv.prefetch(texts, for_next_answer=for_next_answer, **self.reuse_overrides)

    @property
    def reuse_overrides(self) -> dict[str, Any]:
        """The reuse settings that this object was given, as overrides of the engine's."""
        names = ("recompute_ratio", "method", "sink")
        own = given_values(**{name: getattr(self, name) for name in names})
        return {**own, **_part(self.settings, _OF_REUSE)}

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a prompt; ``kwargs`` are decoding and reuse settings for this call."""
        return self._complete(self._rendered(prompt, formatted=formatted), kwargs)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        """Complete a prompt piece by piece."""
        return responses(
            self._stream(self._rendered(prompt, formatted=formatted), kwargs), self._keep
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer chat messages."""
        return as_chat(self._complete(self._chat_prompt(messages, kwargs), kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer chat messages piece by piece."""
        stream = self._stream(self._chat_prompt(messages, kwargs), kwargs)
        return responses(stream, self._keep, as_chat)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        """Complete a prompt; the event loop goes on."""
        return await self._acomplete(self._rendered(prompt, formatted=formatted), kwargs)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Complete a prompt piece by piece."""
        return aresponses(
            self._stream(self._rendered(prompt, formatted=formatted), kwargs), self._keep
        )

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer chat messages; the event loop goes on."""
        return as_chat(await self._acomplete(self._chat_prompt(messages, kwargs), kwargs))

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        """Answer chat messages piece by piece."""
        stream = self._stream(self._chat_prompt(messages, kwargs), kwargs)
        return aresponses(stream, self._keep, as_chat)

    def _arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        ends = (*self.stopping_ids, *self.settings.get("stop_token_ids", ()))
        own = {**self.reuse_overrides, **self.settings, "stop_token_ids": ends}
        return decode_arguments(
            self.generate_kwargs,
            {**own, **kwargs},
            max_new_tokens=self.max_new_tokens,
            generation_config=self.kv.info.generation_config,
        )

    def _complete(self, prompt: Prompt, kwargs: dict[str, Any]) -> CompletionResponse:
        completion = self.kv.generate(prompt, **self._arguments(kwargs))
        self._keep(completion)
        return as_completion(completion)

    async def _acomplete(self, prompt: Prompt, kwargs: dict[str, Any]) -> CompletionResponse:
        """Answer by a stream, so that a call that is cancelled lets go of the model."""
        completion = await self._stream(prompt, kwargs)().awhole()
        self._keep(completion)
        return as_completion(completion)

    def _stream(self, prompt: Prompt, kwargs: dict[str, Any]) -> Begin:
        """Return the callback that starts an answer when its first response is read."""
        return partial(self.kv.stream, prompt, **self._arguments(kwargs))


def _part(settings: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: settings[name] for name in settings if name in names}
