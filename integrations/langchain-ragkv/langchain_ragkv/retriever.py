"""RagKVRetriever: any retriever, whose results start loading at once."""

from __future__ import annotations

import inspect
from typing import Any, Self, cast

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config, run_in_executor
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import patch_config
from langchain_core.vectorstores import VectorStore
from pydantic import ConfigDict, Field, SkipValidation, model_validator

from langchain_ragkv.binding import engine_of
from langchain_ragkv.model import ChunkReuse
from langchain_ragkv.texts import chunk_texts
from ragkv.answer.engine import Engine, OverEngine
from ragkv.errors import ConfigError


class Prefetching(OverEngine, BaseRetriever):
    """A retriever of documents that an engine starts loading."""

    model_config = ConfigDict(extra="forbid")

    llm: ChunkReuse | None = Field(default=None, exclude=True, repr=False)
    """The model that will answer: a ChatRagKV or RagKVLLM, also ``bind(...)`` of one."""
    kv: SkipValidation[Engine | None] = Field(default=None, exclude=True, repr=False)
    """Its engine, if there is no such model."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of :class:`ragkv.ReuseConfig` of its calls, such as ``sink``, those bound to ``llm``
    included."""
    document_prompt: BasePromptTemplate[str] | None = None
    """How the chain renders a document; None is its ``page_content``."""

    @model_validator(mode="before")
    @classmethod
    def _unwrap(cls, values: dict[str, Any]) -> dict[str, Any]:
        if isinstance(values.get("retriever"), VectorStore):
            raise ConfigError("retriever is a vector store: give its .as_retriever()")
        engine, bound = engine_of(values.get("llm"), values.get("kv"))
        name = "llm" if isinstance(engine, ChunkReuse) else "kv"
        return {**values, name: engine, "overrides": {**bound, **values.get("overrides", {})}}

    def _engine(self) -> Engine:
        return cast("Engine", self.kv) if self.llm is None else self.llm.kv

    def _prefetch(self, found: list[Document], *, for_next_answer: bool = True) -> None:
        engine: Any = self.llm or self.kv
        texts = chunk_texts(found, self.document_prompt)
        engine.prefetch(texts, for_next_answer=for_next_answer, **self.overrides)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the settings; the engine, a model over one, and an index are shared."""
        memo = {} if memo is None else memo
        for shared in (self.llm, self.kv, getattr(self, "stages", None)):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)


class RagKVRetriever(Prefetching):
    """Retrieves with ``retriever``; the engine starts loading the found chunks at once.

    They load while the prompt is being composed; chunks that are not stored yet are encoded
    after the answer.
    """

    retriever: Runnable[str, list[Document]]
    """A retriever, or any runnable from a query to documents."""
    k: int | None = Field(default=None, ge=1)
    """Number of documents to return; None is the retriever's own."""

    def invoke(
        self,
        input: str,  # noqa: A002  LangChain's
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Return the documents of ``retriever``, which receives the whole configuration."""
        return super().invoke(input, config, **kwargs, run_config=ensure_config(config))

    async def ainvoke(
        self,
        input: str,  # noqa: A002  LangChain's
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Return the documents of ``retriever``, which receives the whole configuration."""
        return await super().ainvoke(input, config, **kwargs, run_config=ensure_config(config))

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        k = kwargs.pop("k", self.k)
        config = patch_config(kwargs.pop("run_config", None), callbacks=run_manager.get_child())
        retriever, kwargs = _limited(self.retriever, k, kwargs)
        found = retriever.invoke(query, config, **kwargs)[:k]
        self._prefetch(found)
        return found

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        k = kwargs.pop("k", self.k)
        config = patch_config(kwargs.pop("run_config", None), callbacks=run_manager.get_child())
        retriever, kwargs = _limited(self.retriever, k, kwargs)
        found = (await retriever.ainvoke(query, config, **kwargs))[:k]
        await run_in_executor(None, self._prefetch, found)
        return found


Found = Runnable[str, list[Document]]


def _limited(
    retriever: Found, k: int | None, kwargs: dict[str, Any]
) -> tuple[Found, dict[str, Any]]:
    """Limit a retriever to ``k`` documents, by its own field or argument if it has one."""
    if k is not None and isinstance(retriever, RunnableBindingBase):
        bound, kwargs = _limited(retriever.bound, k, kwargs)
        return retriever.model_copy(update={"bound": bound}), kwargs
    if k is None or not isinstance(retriever, BaseRetriever):
        return retriever, kwargs
    if "k" in type(retriever).model_fields:
        return retriever.model_copy(update={"k": k}), kwargs
    takes = inspect.signature(retriever._get_relevant_documents).parameters  # noqa: SLF001
    if "k" in takes or any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        kwargs = {**kwargs, "k": k}
    return retriever, kwargs
