"""Base of both models: an engine, its settings, and the arguments of a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self, cast
from weakref import WeakKeyDictionary

import torch
from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    SkipValidation,
    model_validator,
)

from langchain_ragkv.call import Call
from langchain_ragkv.keywords import Keywords, read_keywords
from langchain_ragkv.load import model_fields
from langchain_ragkv.prompts import prompt_head
from langchain_ragkv.texts import chunk_texts
from langchain_ragkv.tools import definitions
from ragkv import PrecomputeReport, RagKV, ReuseReport, SparseDecoding, StoreConfig
from ragkv.answer.engine import Engine, ModelInfo, OverEngine
from ragkv.config import (
    MOST_LOGPROBS,
    STORE_SETTINGS,
    check_known,
    checked_variables,
    with_store,
)
from ragkv.engine.settings import check_settings
from ragkv.errors import ConfigError
from ragkv.select import method_of

_DEFAULT_MAX_TOKENS = 256
_LOCAL = ("store", "device", "dtype", "prompt_lookup_num_tokens")
"""Fields that are for a model in this process."""
_OF_ENGINES = ("store", "model_id", "device", "dtype", "base_url")
"""Fields that an engine is made from."""
_OF_REUSE = (
    "recompute_ratio",
    "method",
    "sink",
    "auxiliary_model",
    "on_miss",
    "history",
    "calibrated_for",
)
_OF_ANSWERS = ("drafts", "sparse", "ignore_eos", "stop_token_ids", "json_schema")
_OTHER_NAMES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "stop_sequences": "stop",
}
_MADE_FROM: WeakKeyDictionary[Engine, list[dict[str, Any]]] = WeakKeyDictionary()
"""The fields that engines were made from: LangChain re-creates objects from all of their fields."""


class ChunkReuse(OverEngine, BaseModel):
    """A model that answers from precomputed chunk caches.

    A call can override the fields that concern its answer.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    kv: SkipValidation[Engine] = Field(default=cast("Engine", None), exclude=True, repr=False)
    """The engine (or a server's client), made from the other fields unless it is given. It is an
    error to give ``store`` or another model together with it."""
    recompute_ratio: float | Literal["auto"] | None = None
    """Share of cached chunk tokens to recompute: 0 plain reuse, 1 exactly full prefill,
    "auto" chosen for each request. None is the engine's own."""
    method: str | None = None
    """Selection method. None is the engine's own."""
    sink: SkipValidation[str | None] = None
    """Text that chunks are encoded behind. None is the engine's own."""
    auxiliary_model: SkipValidation[str | None] = None
    on_miss: SkipValidation[Literal["store", "skip"] | None] = None
    history: SkipValidation[bool | None] = None
    calibrated_for: SkipValidation[str | None] = None
    """These as in :class:`ragkv.ReuseConfig`. None is the engine's own."""
    sink_from: Any = Field(default=None, exclude=True, repr=False)
    """The prompt template of the pipeline, or its text (a human message for chat models): chunks
    are encoded behind its head, the text before its first variable."""
    sink_tools: Sequence[Any] = Field(default=(), exclude=True, repr=False)
    """Tools that will be bound: their definitions stand in prompts' heads, and so in the sink."""
    store: str | Path | StoreConfig | None = Field(default=None, exclude=True, repr=False)
    """Where an engine made here stores chunks: a folder, ":memory:", a URL, a StoreConfig, or
    None for the user's cache folder. The fields of a StoreConfig, such as ``codec``, can be given
    instead of one."""
    namespace: str = "default"
    """Namespace of the engine."""
    on_unsupported: Literal["raise", "full"] = "raise"
    """``"full"`` serves unsupported models and settings by full prefill."""
    model_id: str | None = None
    """Hub name, folder or GGUF file of the model; None is the embedded default. With
    ``base_url``, the name that the server must have for its model; None is whichever it has."""
    base_url: str | None = Field(default=None, exclude=True)
    """Address of a ``ragkv serve``, such as ``http://gpu:8000``; nothing is loaded here then."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Key of a namespace of that server; None is the environment variable ``RAGKV_API_KEY``.
    Without effect on a model in this process, and beside ``kv``."""
    device: str | torch.device | None = Field(default=None, exclude=True)
    """Device of a model loaded here."""
    dtype: str | torch.dtype | None = Field(default=None, exclude=True)
    """Dtype of a model loaded here."""
    temperature: float | None = Field(default=None, ge=0)
    """None and 0 are greedy decoding."""
    max_tokens: int | None = Field(default=None, ge=1)
    """At most this many tokens are generated; None is 256. Also ``max_completion_tokens``."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    """Nucleus sampling; None is 1."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample among this many most probable tokens; None and 0 are all."""
    seed: int | None = Field(default=None, ge=0)
    """Makes sampling repeatable."""
    stop: str | list[str] | None = None
    """Texts at which an answer ends; it does not contain them. Also ``stop_sequences``."""
    prompt_lookup_num_tokens: int | None = Field(default=None, ge=0)
    """0 switches ragkv's drafts off, by transformers' name for them."""
    drafts: SkipValidation[bool | None] = None
    sparse: SkipValidation[str | SparseDecoding | None] = None
    ignore_eos: SkipValidation[bool | None] = None
    stop_token_ids: SkipValidation[Sequence[int] | None] = None
    json_schema: SkipValidation[dict[str, Any] | None] = None
    """These as in :class:`ragkv.DecodeConfig`."""
    generation: dict[str, Any] | None = None
    """More of transformers' settings, such as ``repetition_penalty``: see ragkv's DecodeConfig."""
    logprobs: bool | int | None = None
    """Whether ``response_metadata["logprobs"]`` has the tokens' log-probabilities, in OpenAI's
    form; a number is ``top_logprobs``, too."""
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

    _chat: ClassVar[bool]
    _info: ModelInfo = PrivateAttr()
    _sink: str | None = PrivateAttr(default=None)
    _last_report: ReuseReport | None = PrivateAttr(default=None)

    @classmethod
    def from_model_id(
        cls,
        model_id: str | None = None,
        task: str | None = None,
        backend: str = "pipeline",
        **kwargs: Any,
    ) -> Self:
        """Load a model and serve it; keywords as in ``HuggingFacePipeline.from_model_id``.

        Parameters
        ----------
        model_id
            Hub name, folder or GGUF file; None is the embedded default.
        task, backend
            ``"text-generation"`` and ``"pipeline"``; there is no other.
        **kwargs
            Fields of this class, and ``device``, ``device_map``, ``model_kwargs`` and
            ``pipeline_kwargs`` as there.

        Raises
        ------
        ConfigError
            A setting cannot be kept.
        UnsupportedModelError
            The model's caches cannot be reused exactly.
        """
        return cls(**model_fields(model_id, task, backend, kwargs))

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "llm" in values:
            raise ConfigError(
                "llm: give ChatRagKV.from_model_id(...) HuggingFacePipeline's arguments, or "
                "kv=RagKV(llm.pipeline.model, llm.pipeline.tokenizer) for a model that is loaded"
            )
        check_engine(values.get("kv"))
        aliases = [each.alias for each in cls.model_fields.values() if each.alias]
        known = {*cls.model_fields, *aliases, *_OTHER_NAMES, *STORE_SETTINGS}
        check_known("field", values, known)
        given = {_OTHER_NAMES.get(name, name): value for name, value in values.items()}
        return with_store(given)

    @model_validator(mode="after")
    def _open_engine(self) -> Self:
        made_from = {name: getattr(self, name) for name in _OF_ENGINES}
        is_new = self.kv is None
        if is_new:
            check_settings(
                None,
                self._overrides(),
                store=self.store,
                namespace=self.namespace,
                decode=_given(self, _OF_ANSWERS),
            )
            self.kv = self._make_engine()
            _MADE_FROM.setdefault(self.kv, []).append(made_from)
        self._info = self.kv.info
        own = {"model_id": self._info.name}
        given = [name for name, value in made_from.items() if value not in (None, own.get(name))]
        if given and made_from not in _MADE_FROM.get(self.kv, ()):
            raise ConfigError(
                f"the given engine has its own {', '.join(given)}: omit that, or give no kv"
            )
        if self.namespace != self.kv.namespace and "namespace" in self.model_fields_set:
            raise ConfigError(
                f"the given engine has namespace {self.kv.namespace!r}, not "
                f"{self.namespace!r}: make one for each namespace"
            )
        self.namespace = self.kv.namespace
        variables, here = self._variables, not hasattr(self.kv, "base_url")
        own_head = bool(variables) and here and self.kv.reuse.sink == "auto"
        if self.sink is not None:
            if self.sink_from is not None or self.sink_tools:
                raise ConfigError("sink and sink_from (or sink_tools): give one of them")
            self._sink = self.sink
        elif self.sink_from is not None or self.sink_tools or own_head:
            template = "{question}" if self.sink_from is None else self.sink_from
            tools = definitions(self.sink_tools)
            self._sink = prompt_head(template, self.kv, tools, variables, chat=self._chat)
        if is_new and self._sink is not None:  # models over this engine share its chunks
            self.kv.reuse = self.kv.reuse.override(sink=self._sink)
        method_of(self.kv.reuse.override(**self._overrides()))  # raises early
        return self

    def _make_engine(self) -> Engine:
        if self.base_url is None:
            given: dict[str, Any] = {name: getattr(self, name) for name in ("device", "dtype")}
            given |= {"namespace": self.namespace, "on_unsupported": self.on_unsupported}
            return RagKV(self.model_id, store=self.store, **given)
        local = [name for name in _LOCAL if getattr(self, name) is not None]
        if local := [*local, *["on_unsupported"] * (self.on_unsupported != "raise")]:
            raise ConfigError(
                f"{', '.join(local)}: the model of base_url is the server's, and so is that; omit "
                "it, or omit base_url to load a model here"
            )
        from ragkv.client import TIMEOUT_S, RemoteRagKV

        return RemoteRagKV(
            self.base_url,
            None if self.api_key is None else self.api_key.get_secret_value(),
            timeout=self.timeout or TIMEOUT_S,
            max_retries=self.max_retries,
            model=self.model_id,
        )

    def _engine(self) -> Engine:
        return self.kv

    @property
    def _variables(self) -> dict[str, Any]:
        """Variables of the chat template, in all prompts."""
        return checked_variables(getattr(self, "chat_template_kwargs", None))

    def _overrides(self, changes: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return this model's reuse settings with a call's own on top."""
        sink = {} if self._sink is None else {"sink": self._sink}
        return {**sink, **_given(self, _OF_REUSE), **(changes or {})}

    def _read(self, given: dict[str, Any]) -> tuple[Keywords, dict[str, Any]]:
        usual = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return read_keywords({**usual, **given})

    def _call(self, stop: list[str] | None, given: dict[str, Any]) -> Call:
        """One call's settings: the fields, with the call's own on top."""
        keywords, given = self._read(given)
        timeout = given.pop("timeout", self.timeout)
        limit = given.pop("max_tokens", self.max_tokens)
        names = ("temperature", "top_p", "top_k", "seed", "prompt_lookup_num_tokens")
        own = {name: given.pop(name, getattr(self, name)) for name in names}
        if (lookup := own.pop("prompt_lookup_num_tokens")) is not None:
            own["drafts"] = lookup > 0
        texts = (stop, given.pop("stop_sequences", None), self.stop)
        ends = next((each for each in texts if each is not None), ())
        variables = self._variables | checked_variables(given.pop("chat_template_kwargs", None))
        arguments = {
            **({"generation": self.generation} if self.generation else {}),
            **_given(self, _OF_ANSWERS),
            **own,
            "temperature": own["temperature"] or 0.0,
            "max_new_tokens": _DEFAULT_MAX_TOKENS if limit is None else limit,
            "top_p": 1.0 if own["top_p"] is None else own["top_p"],
            "top_k": own["top_k"] or 0,
            "json_schema": given.pop("json_schema", self.json_schema),
            "chat_template_kwargs": variables,
            "stop": (ends,) if isinstance(ends, str) else tuple(ends),
            **self._overrides(given),
        }
        return Call(self.kv, self.model_name, arguments, timeout, self._keep, keywords)

    def _keep(self, report: ReuseReport) -> None:
        self._last_report = report

    @property
    def model_name(self) -> str:
        """Name of the model that answers."""
        return self._info.name

    @property
    def last_report(self) -> ReuseReport | None:
        """The whole report of the last answer; messages have all but the texts."""
        return self._last_report

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """The settings that determine answers: the key of LangChain's cache."""
        return {
            "base_url": getattr(self.kv, "base_url", None),
            "model_name": self.model_name,
            "fingerprint": self.kv.info.fingerprint,
            "namespace": self.kv.namespace,
            "reuse": str(self.kv.reuse.override(**self._overrides())),
            **self._call(None, {}).arguments,
            "own_stop": self.stop,  # LangChain replaces "stop" by the call's
        }

    def get_token_ids(self, text: str) -> list[int]:
        """Return a text's tokens by the model's own tokenizer."""
        own = getattr(self, "custom_get_token_ids", None) or self.kv.tokenize
        return list(own(text))

    def precompute(
        self,
        documents: Iterable[Document | str],
        *,
        document_prompt: BasePromptTemplate[str] | None = None,
        show_progress: bool | None = None,
        **settings: Any,
    ) -> PrecomputeReport:
        """Encode and store documents (or texts), once, at ingestion.

        Parameters
        ----------
        document_prompt
            How the chain renders a document; None is its ``page_content``.
        show_progress
            As in :meth:`ragkv.RagKV.precompute`; None shows the bar in a terminal, and
            lines elsewhere.
        **settings
            ``document``, ``revision``, ``expires_in`` and ``neighbours`` as there: the document
            whose chunks these are, so that chunks of an older version are deleted, the seconds
            until they expire, and whether they are also computed behind one another.
            Fields of :class:`ragkv.ReuseConfig`, such as ``sink``.
        """
        texts = chunk_texts(documents, document_prompt)
        given = self._overrides(settings)
        return self.kv.precompute(texts, show_progress=show_progress, **given)

    def prefetch(
        self, texts: Sequence[str], *, for_next_answer: bool = True, **overrides: Any
    ) -> None:
        """Name the chunks of the next prompt, as :meth:`ragkv.RagKV.prefetch`."""
        given = self._overrides(overrides)
        self.kv.prefetch(texts, for_next_answer=for_next_answer, **given)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the settings; the engine is shared."""
        memo = {} if memo is None else memo
        memo[id(self.kv)] = self.kv
        return super().__deepcopy__(memo)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} has a model and a store, which cannot be pickled: make one "
            "in each process"
        )


def _given(model: ChunkReuse, names: Iterable[str]) -> dict[str, Any]:
    """Return the fields that are not None."""
    found = {name: getattr(model, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def check_engine(kv: object) -> None:
    """Raise ConfigError unless the object is an engine."""
    if kv is not None and not hasattr(type(kv), "precompute"):
        raise ConfigError(f"kv must be a RagKV or a RemoteRagKV, not {type(kv).__name__}")
