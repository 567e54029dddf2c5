"""RagKVRetriever: any retriever, whose results start loading at once."""

from __future__ import annotations

import inspect
from typing import Any, Self

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

from langchain_ragkv.engine import ChunkReuse, check_engine, unwrapped
from langchain_ragkv.texts import chunk_texts
from ragkv.answer.engine import Engine
from ragkv.errors import ConfigError


class RagKVRetriever(BaseRetriever):
    """Retrieves with ``retriever``; the engine starts loading the found chunks at once.

    They load while the prompt is being composed; chunks that are not stored yet are encoded
    after the answer.
    """

    model_config = ConfigDict(extra="forbid")

    retriever: Runnable[str, list[Document]]
    """A retriever, or any runnable from a query to documents."""
    llm: ChunkReuse | None = Field(default=None, exclude=True, repr=False)
    """The model that will answer: a ChatRagKV or RagKVLLM, also ``bind(...)`` of one."""
    kv: SkipValidation[Engine | None] = Field(default=None, exclude=True, repr=False)
    """Its engine, if there is no such model."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of :class:`ragkv.ReuseConfig` of its calls, such as ``sink``, those bound to ``llm``
    included."""
    k: int | None = Field(default=None, ge=1)
    """Number of documents to return; None is the retriever's own."""
    document_prompt: BasePromptTemplate[str] | None = None
    """How the chain renders a document; None is ``page_content`` alone."""

    @model_validator(mode="before")
    @classmethod
    def _unwrap(cls, values: dict[str, Any]) -> dict[str, Any]:
        if isinstance(values.get("retriever"), VectorStore):
            raise ConfigError("retriever is a vector store: give its .as_retriever()")
        check_engine(values.get("kv"))
        if values.get("llm") is None:
            return values
        llm, bound = unwrapped(values["llm"])
        return {**values, "llm": llm, "overrides": {**bound, **values.get("overrides", {})}}

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if (self.llm is None) == (self.kv is None):
            raise ConfigError("RagKVRetriever needs either llm=... or kv=...")
        return self

    def invoke(
        self,
        input: str,  # noqa: A002  LangChain's
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Retrieve, with the whole configuration, as ``retriever`` would alone."""
        return super().invoke(input, config, **kwargs, run_config=ensure_config(config))

    async def ainvoke(
        self,
        input: str,  # noqa: A002  LangChain's
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Retrieve, with the whole configuration, as ``retriever`` would alone."""
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

    def _prefetch(self, documents: list[Document]) -> None:
        texts = chunk_texts(documents, self.document_prompt)
        if self.llm is not None:
            self.llm.prefetch(texts, **self.overrides)
        elif self.kv is not None:
            self.kv.prefetch(texts, **self.overrides)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the settings; the engine, and a model over one, are shared."""
        memo = {} if memo is None else memo
        for shared in (self.llm, self.kv):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)


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
