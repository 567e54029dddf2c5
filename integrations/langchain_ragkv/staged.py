"""RagKVStagedRetriever: what each stage found is loading while the next one is searched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import run_in_executor
from pydantic import ConfigDict, Field, model_validator

from langchain_ragkv.engine import ChunkReuse, unwrapped
from langchain_ragkv.texts import chunk_texts


class RagKVStagedRetriever(BaseRetriever):
    """Retrieves in stages; what each one found is loading while the next one is searched."""

    model_config = ConfigDict(extra="forbid")

    stages: Callable[[str], Iterable[Sequence[Document | tuple[Document, float]]]]
    """Returns, for a query, the lists of documents found so far, with or without scores. The last
    is the result. A :class:`ragkv.retrieve.staged.StagedSearch`, or a generator function that
    yields the first hits and then, reranked, the final ones."""
    llm: ChunkReuse = Field(exclude=True, repr=False)
    """The model that will answer: a ChatRagKV or RagKVLLM, also ``bind(...)`` of one."""
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
        last = deque(self._loading(query), maxlen=1)
        found = last.pop() if last else []
        self._prefetch(found)
        return found

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        del run_manager
        found, stages = list[Document](), self._loading(query)
        while (more := await run_in_executor(None, next, stages, None)) is not None:
            found = more
        await run_in_executor(None, self._prefetch, found)
        return found

    def _loading(self, query: str) -> Iterator[list[Document]]:
        """Yield the documents of each stage, whose entries are loading then."""
        for hits in self.stages(query):
            found = [each[0] if isinstance(each, tuple) else each for each in hits]
            self._prefetch(found, for_next_answer=False)
            yield found

    def _prefetch(self, found: list[Document], *, for_next_answer: bool = True) -> None:
        texts = chunk_texts(found, self.document_prompt)
        self.llm.prefetch(texts, for_next_answer=for_next_answer, **self.overrides)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Copy the settings; the model, and an index, are shared."""
        memo = {} if memo is None else memo
        for shared in (self.llm, self.stages):
            memo[id(shared)] = shared
        return super().__deepcopy__(memo)
