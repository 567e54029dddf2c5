"""The engine behind both models: its fields, its settings, and ingestion."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self, cast
from weakref import WeakKeyDictionary

from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables.base import RunnableBindingBase
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SkipValidation,
    model_validator,
)

from langchain_ragkv.prompts import prompt_head
from langchain_ragkv.texts import chunk_texts
from langchain_ragkv.tools import definitions
from ragkv import PrecomputeReport, RagKV, ReuseConfig, ReuseReport, StoreConfig
from ragkv.answer.engine import Engine, ModelInfo
from ragkv.config import check_known, check_removed
from ragkv.engine.settings import check_settings
from ragkv.errors import ConfigError
from ragkv.select import method_of

_MADE_FROM: WeakKeyDictionary[Engine, list[dict[str, Any]]] = WeakKeyDictionary()
"""The fields that engines were made from: LangChain re-creates objects from all of their fields."""


class ChunkReuse(BaseModel):
    """Fields and methods of a model that answers from precomputed chunk caches."""

    model_config = ConfigDict(arbitrary_types_allowed=True, populate_by_name=True)

    kv: SkipValidation[Engine] = Field(default=cast("Engine", None), exclude=True, repr=False)
    """The engine (or a server's client), made from the other fields unless it is given. It is an
    error to give ``store`` or another model together with it."""
    recompute_ratio: float | Literal["auto"] | None = None
    """Share of cached chunk tokens to recompute: 0 plain reuse, 1 exactly full prefill,
    "auto" chosen for each request. None is the engine's own."""
    method: str | None = None
    """Selection method. None is the engine's own."""
    sink_from: Any = Field(default=None, exclude=True, repr=False)
    """The prompt template of the pipeline, or its text (a human message for chat models): chunks
    are encoded behind its head, the text before its first variable."""
    sink_tools: Sequence[Any] = Field(default=(), exclude=True, repr=False)
    """Tools that will be bound: their definitions stand in prompts' heads, and so in the sink."""
    store: str | Path | StoreConfig | None = Field(default=None, exclude=True, repr=False)
    """Where an engine made here stores chunks: a folder, ":memory:", a URL, a StoreConfig, or
    None for the user's cache folder."""
    namespace: str = "default"
    """Namespace of the engine."""
    on_unsupported: Literal["raise", "full"] = "raise"
    """``"full"`` serves unsupported models and settings by full prefill."""

    _chat: ClassVar[bool]
    _engine_fields: ClassVar[tuple[str, ...]] = ("store",)
    _info: ModelInfo = PrivateAttr()
    _sink: str | None = PrivateAttr(default=None)
    _last_report: ReuseReport | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: dict[str, Any]) -> dict[str, Any]:
        if "llm" in values:
            raise ConfigError(
                "llm: give ChatRagKV.from_model_id(...) HuggingFacePipeline's arguments, or "
                "kv=RagKV(llm.pipeline.model, llm.pipeline.tokenizer) for a model that is loaded"
            )
        check_engine(values.get("kv"))
        check_removed(values, known=cls.model_fields)
        others = [each.validation_alias for each in cls.model_fields.values()]
        aliases = [each for each in others if isinstance(each, str)]
        choices = [
            name for each in others if isinstance(each, AliasChoices) for name in each.choices
        ]
        check_known("field", values, {*cls.model_fields, *aliases, *map(str, choices)})
        return values

    @model_validator(mode="after")
    def _open_engine(self) -> Self:
        made_from = {name: getattr(self, name) for name in self._engine_fields}
        if self.kv is None:
            check_settings(None, self._overrides(), store=self.store, namespace=self.namespace)
            self.kv = self._make_engine()
            _MADE_FROM.setdefault(self.kv, []).append(made_from)
            self._info = self.kv.info
        else:
            self._info = self.kv.info
            self._check_given(made_from)
        self._take_namespace()
        variables, here = self._variables, not hasattr(self.kv, "base_url")
        own_head = bool(variables) and here and self.kv.reuse.sink == "auto"
        if self.sink_from is not None or self.sink_tools or own_head:
            template = "{question}" if self.sink_from is None else self.sink_from
            tools = definitions(self.sink_tools)
            given: dict[str, Any] = {"tools": tools, "chat_template_kwargs": variables}
            self._sink = prompt_head(template, self.kv, chat=self._chat, **given)
        method_of(self.kv.reuse.override(**self._overrides()))  # raises early
        return self

    def _check_given(self, made_from: dict[str, Any]) -> None:
        """Refuse fields that have no effect on a given engine."""
        own = {"model_id": self._info.name}
        given = [name for name, value in made_from.items() if value not in (None, own.get(name))]
        if given and made_from not in _MADE_FROM.get(self.kv, ()):
            raise ConfigError(
                f"the given engine has its own {', '.join(given)}: omit that, or give no kv"
            )

    def _take_namespace(self) -> None:
        """Take the engine's namespace; refuse another one."""
        if "namespace" not in self.model_fields_set:
            self.namespace = self.kv.namespace
        elif self.namespace != self.kv.namespace:
            raise ConfigError(
                f"the given engine has namespace {self.kv.namespace!r}, not "
                f"{self.namespace!r}: make one for each namespace"
            )

    @property
    def _variables(self) -> dict[str, Any]:
        """Variables of the chat template, in all prompts."""
        return {}

    @abstractmethod
    def _make_engine(self) -> Engine:
        """Make the engine from the fields."""

    def _engine(self, *model: Any, **kwargs: Any) -> RagKV:
        return RagKV(
            *model,
            store=self.store,
            namespace=self.namespace,
            on_unsupported=self.on_unsupported,
            **kwargs,
        )

    def _overrides(self, changes: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return this model's reuse settings with a call's own on top."""
        own = {"recompute_ratio": self.recompute_ratio, "method": self.method, "sink": self._sink}
        return {name: value for name, value in own.items() if value is not None} | (changes or {})

    @property
    def last_report(self) -> ReuseReport | None:
        """The whole report of the last answer; messages have all but the texts."""
        return self._last_report

    def _keep(self, report: ReuseReport) -> None:
        self._last_report = report

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the settings; the engine is shared."""
        memo = {} if memo is None else memo
        memo[id(self.kv)] = self.kv
        return super().__deepcopy__(memo)

    @property
    def _identity(self) -> dict[str, Any]:
        """What answers depend on in addition to a call's settings: a key for LangChain's cache."""
        return {
            "base_url": getattr(self.kv, "base_url", None),
            "model_name": self._info.name,
            "fingerprint": self.kv.info.fingerprint,
            "namespace": self.kv.namespace,
            "reuse": str(self.kv.reuse.override(**self._overrides())),
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
        document: str | None = None,
        revision: str | None = None,
        expires_in: float | None = None,
        show_progress: bool | None = None,
        **overrides: Any,
    ) -> PrecomputeReport:
        """Encode and store documents (or texts), once, at ingestion.

        Parameters
        ----------
        document_prompt
            How the chain renders a document; None is ``page_content`` alone.
        document, revision, expires_in
            As in :meth:`ragkv.RagKV.precompute`: the document whose chunks these are, so that
            chunks of an older version are deleted, and the seconds until they expire.
        show_progress
            As there; None shows the bar in a terminal alone, and one line elsewhere.
        **overrides
            Fields of :class:`ragkv.ReuseConfig`, such as ``sink``.
        """
        return self.kv.precompute(
            chunk_texts(documents, document_prompt),
            document=document,
            revision=revision,
            expires_in=expires_in,
            show_progress=show_progress,
            **self._overrides(overrides),
        )

    def prefetch(
        self, texts: Sequence[str], *, for_next_answer: bool = True, **overrides: Any
    ) -> None:
        """Name the chunks of the next prompt, as :meth:`ragkv.RagKV.prefetch`."""
        given = self._overrides(overrides)
        self.kv.prefetch(texts, for_next_answer=for_next_answer, **given)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} has a model and a store, which cannot be pickled: make one "
            "in each process"
        )


def check_engine(kv: object) -> None:
    """Raise ConfigError for what is no engine."""
    if kv is not None and not hasattr(type(kv), "precompute"):
        raise ConfigError(f"kv must be a RagKV or a RemoteRagKV, not {type(kv).__name__}")


def engine_of(llm: Any, kv: Engine | None) -> tuple[Engine | ChunkReuse, dict[str, Any]]:
    """Return what precomputes, of ``llm=`` or ``kv=``, and the settings that are bound to it."""
    if (llm is None) == (kv is None):
        raise ConfigError("give either llm=... or kv=...")
    return (kv, {}) if kv is not None else unwrapped(llm)


def unwrapped(llm: Any) -> tuple[ChunkReuse, dict[str, Any]]:
    """Return the model within ``llm.bind(...)``, ``llm.with_config(...)`` and the like.

    The second value are the bound fields of :class:`ragkv.ReuseConfig`.

    Raises
    ------
    ConfigError
        There is no such model in it.
    """
    inner, bound = llm, dict[str, Any]()
    while isinstance(inner, RunnableBindingBase):
        bound = {**inner.kwargs, **bound}
        inner = inner.bound
    if not isinstance(inner, ChunkReuse):
        raise ConfigError(
            f"llm must be the ChatRagKV or RagKVLLM that will answer, not {type(inner).__name__}"
        )
    reuse = {field.name for field in fields(ReuseConfig)}
    return inner, {name: bound[name] for name in bound if name in reuse}
