"""ChatRagKV: a chat model that answers from precomputed chunk caches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    model_validator,
)
from transformers import Pipeline

from langchain_ragkv.call import Call
from langchain_ragkv.engine import ChunkReuse
from langchain_ragkv.generation import PipelineSettings, read_settings
from langchain_ragkv.keywords import Keywords, read_keywords
from langchain_ragkv.load import model_fields
from langchain_ragkv.pieces import apieces, pieces
from langchain_ragkv.structured import calling, following
from langchain_ragkv.tools import definitions
from ragkv import RagKV
from ragkv.config import MOST_LOGPROBS, checked_variables
from ragkv.errors import ConfigError
from ragkv.serve.client import TIMEOUT_S, RemoteRagKV

_DEFAULT_MAX_TOKENS = 256
_FIELDS = ("temperature", "top_p", "top_k", "prompt_lookup_num_tokens")
_OF_PIPELINE = ("generation", "ignore_eos", "stop_token_ids")
"""Settings that a pipeline may have, and this class has no fields for."""
_LOCAL = ("llm", "store", "device", "dtype", "prompt_lookup_num_tokens")
"""Fields that are for a model in this process."""


class ChatRagKV(ChunkReuse, BaseChatModel):
    """Chat model over precomputed chunk caches.

    Without arguments it serves the embedded default model. Give ``model_id``, or an
    engine (``kv``), or the ``HuggingFacePipeline`` that ChatHuggingFace had (``llm``), or the
    address of a ``ragkv serve`` (``base_url``), which then has the model and the store.
    Every setting can be given per call as well, the engine's reuse settings included:
    ``invoke(messages, recompute_ratio=0.1)``, ``bind(method="query")``.

    Answers carry ``usage_metadata`` (with ``cache_read``) and, in
    ``response_metadata["ragkv"]``, how many of the prompt's tokens came from where, by chunk,
    the misses, times and warnings of :class:`ragkv.ReuseReport`, without the chunks' texts;
    ``last_report`` is all of it.
    """

    model_config = ConfigDict(extra="forbid")

    model_id: str | None = None
    """Hub name or folder of the model; None is the embedded default. With ``base_url``, the name
    that the server must have for its model; None is whichever it has."""
    base_url: str | None = Field(default=None, exclude=True)
    """Address of a ``ragkv serve``, such as ``http://gpu:8000``; nothing is loaded here then."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Key of a namespace of that server; None is the environment variable ``RAGKV_API_KEY``.
    Without effect on a model in this process, and beside ``kv``."""
    llm: Any = Field(default=None, exclude=True, repr=False)
    """A HuggingFacePipeline or RagKVPipeline to take the model and its settings from."""
    temperature: float | None = Field(default=None, ge=0)
    """None and 0 are greedy decoding."""
    max_tokens: int | None = Field(
        default=None, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens")
    )
    """At most this many tokens are generated; None is 256, or what a ``max_length`` of
    the pipeline of ``llm`` leaves after the prompt."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    """Nucleus sampling; None is 1."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample among this many most probable tokens; None and 0 are all."""
    seed: int | None = Field(default=None, ge=0)
    """Makes sampling repeatable."""
    stop: str | list[str] | None = Field(default=None, alias="stop_sequences")
    """Texts at which an answer ends; it does not contain them. Those of the pipeline of
    ``llm`` end it, too."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template, such as ``{"enable_thinking": False}``; those of a
    call are put on top."""
    prompt_lookup_num_tokens: int | None = Field(default=None, ge=0)
    """Longest draft of prompt lookup decoding; None is ragkv's choice, 0 none."""
    generation: dict[str, Any] | None = None
    """More of transformers' settings, such as ``repetition_penalty``: see ragkv's DecodeConfig."""
    logprobs: bool | None = None
    """Whether ``response_metadata["logprobs"]`` has the tokens' log-probabilities, in OpenAI's
    form."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    """Of how many most probable tokens, beside each."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds after which an answer is given up with a TimeoutError, time spent waiting for the
    model included. None is 600 with ``base_url``, and any time without."""
    max_retries: int = Field(default=2, ge=0)
    """How often a request to a server is sent again where no connection comes about or the server
    is busy. A model in this process needs none."""
    streaming: bool = False
    """Whether ``invoke`` streams, for callbacks that want every token."""
    device: str | torch.device | None = Field(default=None, exclude=True)
    """Device of a model loaded here."""
    dtype: str | torch.dtype | None = Field(default=None, exclude=True)
    """Dtype of a model loaded here."""

    _chat: ClassVar[bool] = True
    _engine_fields: ClassVar[tuple[str, ...]] = ("store", "model_id", "device", "dtype", "base_url")
    _inner: PipelineSettings | None = PrivateAttr(default=None)

    @classmethod
    def from_model_id(
        cls,
        model_id: str | None = None,
        task: str | None = None,
        backend: str = "pipeline",
        **kwargs: Any,
    ) -> Self:
        """Load a model and serve it; keywords as in ``ChatHuggingFace.from_model_id``.

        Parameters
        ----------
        model_id
            Hub name or folder; None is the embedded default.
        task, backend
            ``"text-generation"`` and ``"pipeline"``; there is no other.
        **kwargs
            Fields of this class (``recompute_ratio``, ``method``, ``store``, ``namespace``,
            ``sink_from``, ``temperature``, ...), and ``device``, ``device_map``,
            ``model_kwargs`` and ``pipeline_kwargs`` as there.

        Raises
        ------
        ConfigError
            A setting cannot be kept.
        UnsupportedModelError
            The model's caches cannot be reused exactly.
        """
        return cls(**model_fields(model_id, task, backend, kwargs))

    def _make_engine(self) -> RagKV | RemoteRagKV:
        if self.base_url is not None:
            return self._make_client(self.base_url)
        if self.llm is None:
            return self._engine(self.model_id, device=self.device, dtype=self.dtype)
        if isinstance(self.llm, ChunkReuse):
            return self.llm.kv
        if not isinstance(getattr(self.llm, "pipeline", None), Pipeline):
            raise ConfigError(
                "llm must be a HuggingFacePipeline or a RagKVPipeline, not "
                f"{type(self.llm).__name__}: give model_id=... or kv=... for a model alone"
            )
        return self._engine(self.llm.pipeline.model, self.llm.pipeline.tokenizer)

    def _make_client(self, base_url: str) -> RemoteRagKV:
        given = [name for name in _LOCAL if getattr(self, name) is not None]
        given += ["on_unsupported"] * (self.on_unsupported != "raise")
        if given:
            raise ConfigError(
                f"{', '.join(given)}: the model of base_url is the server's, and so is that; omit "
                "it, or omit base_url to load a model here"
            )
        return RemoteRagKV(
            base_url,
            None if self.api_key is None else self.api_key.get_secret_value(),
            timeout=self.timeout or TIMEOUT_S,
            max_retries=self.max_retries,
            model=self.model_id,
        )

    @model_validator(mode="after")
    def _take_settings(self) -> Self:
        """Take what is not set here from the pipeline of ``llm``."""
        if self.llm is None:
            return self
        settings = read_settings(self.llm.pipeline)
        settings.check()
        self._inner = settings
        given = settings.arguments
        own: dict[str, Any] = {name: given[name] for name in _FIELDS if name in given}
        own["max_tokens"] = None if settings.max_length else given.get("max_new_tokens")
        if isinstance(self.llm, ChunkReuse):
            own |= {"method": self.llm.method, "recompute_ratio": self.llm.recompute_ratio}
        for name, value in own.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self

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
            ``"json_mode"``: any JSON object, which is then read as the schema says.
        include_raw
            Whether the outcome is ``{"raw", "parsed", "parsing_error"}``.
        **kwargs
            Settings of the calls. ``strict=True`` refuses a schema with keywords that cannot be
            enforced; otherwise answers follow the rest of it.
        """
        if method == "function_calling":
            return calling(self.bind_tools, schema, include_raw=include_raw, **kwargs)
        strict = bool(kwargs.pop("strict", False))
        bind = partial(self.bind, **kwargs)
        return following(bind, schema, method=method, include_raw=include_raw, strict=strict)

    @property
    def model_name(self) -> str:
        """Name of the model that answers."""
        return self.kv.model_name

    @property
    def _llm_type(self) -> str:
        return "ragkv-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**self._identity, **self._call(None, {}).arguments}

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(stop, kwargs)
        stream = call.start(messages)
        for _ in pieces(stream, call.timeout):
            pass
        return call.result(stream.completion)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(stop, kwargs)
        stream = call.start(messages)
        async for _ in apieces(stream, call.timeout):
            pass
        return call.result(stream.completion)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(stop, kwargs)
        stream = call.start(messages)
        for piece in pieces(stream, call.timeout):
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield call.last_chunk(stream.completion)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(stop, kwargs)
        stream = call.start(messages)
        async for piece in apieces(stream, call.timeout):
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager:
                await run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield call.last_chunk(stream.completion)

    def _read(self, given: dict[str, Any]) -> tuple[Keywords, dict[str, Any]]:
        usual = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return read_keywords({**usual, **given})

    def _call(
        self,
        stop: list[str] | None,
        given: dict[str, Any],
    ) -> Call:
        """One call's settings: the fields, with the call's own on top."""
        keywords, given = self._read(given)
        timeout = given.pop("timeout", self.timeout)
        engine = ("seed", "prompt_lookup_num_tokens")
        names = ("temperature", "max_tokens", "top_p", "top_k", *engine)
        own = {name: given.pop(name, getattr(self, name)) for name in names}
        limits = (own["max_tokens"], self.max_tokens)
        limit = next((limit for limit in limits if limit is not None), None)
        sequences = given.pop("stop_sequences", None)
        texts = next((each for each in (stop, sequences) if each is not None), self.stop)
        inner = {} if self._inner is None else self._inner.limited(limit)
        variables = self._variables | checked_variables(given.pop("chat_template_kwargs", None))
        arguments = {
            **{name: inner[name] for name in _OF_PIPELINE if name in inner},
            **({"generation": self.generation} if self.generation else {}),
            "temperature": own["temperature"] or 0.0,
            "max_new_tokens": inner.get(
                "max_new_tokens", _DEFAULT_MAX_TOKENS if limit is None else limit
            ),
            "top_p": 1.0 if own["top_p"] is None else own["top_p"],
            "top_k": own["top_k"] or 0,
            **{name: own[name] for name in engine},
            "json_schema": given.pop("json_schema", None),
            "chat_template_kwargs": variables,
            "stop": (
                *inner.get("stop", ()),
                *((texts,) if isinstance(texts, str) else texts or ()),
            ),
            **self._overrides(given),
        }
        return Call(self.kv, arguments, timeout, self._keep, keywords)

    @property
    def _variables(self) -> dict[str, Any]:
        return checked_variables(self.chat_template_kwargs)
