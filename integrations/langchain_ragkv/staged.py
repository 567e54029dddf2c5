"""RagKVStagedRetriever: the prompt is computed while retrieval still goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelInput
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import run_in_executor
from pydantic import ConfigDict, Field, model_validator

from langchain_ragkv.engine import ChunkReuse, unwrapped
from langchain_ragkv.texts import chunk_texts
from ragkv import Chat
from ragkv.retrieve.following import afollow, follow


class RagKVStagedRetriever(BaseRetriever):
    """Retrieves in stages; the engine computes the prompt of each one while the next is searched.

    The chain's prompt is served from that if its text is the same; otherwise it is computed as
    ever. The model is in this process.
    """

    model_config = ConfigDict(extra="forbid")

    stages: Callable[[str], Iterable[Sequence[Document | tuple[Document, float]]]]
    """Returns, for a query, the lists of documents found so far, with or without scores. The last
    is the result. A :class:`ragkv.StagedSearch`, or a generator function that yields the first
    hits and then, reranked, the final ones."""
    llm: ChunkReuse = Field(exclude=True, repr=False)
    """The model that will answer: a ChatRagKV or RagKVLLM, also ``bind(...)`` of one."""
    prompt: Callable[[str, list[Document]], LanguageModelInput]
    """Returns the prompt that the chain will ask with a query and its documents."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of :class:`ragkv.ReuseConfig` of its calls, those bound to ``llm`` included."""
    document_prompt: BasePromptTemplate[str] | None = None
    """How the chain renders a document; None is ``page_content`` alone."""

    @model_validator(mode="before")
    @classmethod
    def _unwrap(cls, values: dict[str, Any]) -> dict[str, Any]:
        llm, bound = unwrapped(values.get("llm"))
        return {**values, "llm": llm, "overrides": {**bound, **values.get("overrides", {})}}

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        del run_manager
        asked = self._documents(query), self._prompt_of(query)
        found: list[Document] = follow(self.llm.kv, *asked, **self._settings)
        self._name(found)
        return found

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        del run_manager
        asked = self._documents(query), self._prompt_of(query)
        found: list[Document] = await afollow(self.llm.kv, *asked, **self._settings)
        await run_in_executor(None, self._name, found)
        return found

    def _documents(self, query: str) -> Iterator[list[Document]]:
        for found in self.stages(query):
            yield [each[0] if isinstance(each, tuple) else each for each in found]

    @property
    def _settings(self) -> dict[str, Any]:
        return self.llm._overrides(self.overrides)  # noqa: SLF001  a part of this package

    def _prompt_of(self, query: str) -> Callable[[Sequence[Document]], str | Chat]:
        return lambda found: self.llm.as_prompt(self.prompt(query, list(found)))

    def _name(self, found: list[Document]) -> None:
        """Have those that are not stored encoded after the answer."""
        self.llm.prefetch(chunk_texts(found, self.document_prompt), **self.overrides)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the settings; the model, and an index, are shared."""
        memo = {} if memo is None else memo
        for shared in (self.llm, self.stages):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)
