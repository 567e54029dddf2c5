"""RagKVStagedRetriever: a stage's chunks load during the next stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.runnables import run_in_executor

from langchain_ragkv.retriever import Prefetching


class RagKVStagedRetriever(Prefetching):
    """Retrieves in stages; a stage's chunks load during the next stage."""

    stages: Callable[[str], Iterable[Sequence[Document | tuple[Document, float]]]]
    """Returns, for a query, the lists of documents found so far, with or without scores. The last
    is the result: a generator function that yields the first hits and then, reranked, the final
    ones."""

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
