"""RagKVStagedRetriever: a stage's chunks load during the next stage."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
from llama_index.llms.ragkv.base import RagKVLLM
from llama_index.llms.ragkv.retriever import Prefetching


class RagKVStagedRetriever(Prefetching):
    """Retrieves in stages; a stage's chunks load during the next stage.

    Parameters
    ----------
    stages
        Returns, for a query, the lists of nodes found so far, as NodeWithScore or as pairs of
        node and score. The last is the result: a generator function that yields the first hits
        and then, reranked, the final ones.
    llm
        The LLM that will answer.
    metadata_mode, metadata_key
        As for :class:`RagKVRetriever`.
    """

    def __init__(
        self,
        stages: Callable[[str], Iterable[Sequence[NodeWithScore | tuple[BaseNode, float]]]],
        llm: RagKVLLM,
        callback_manager: CallbackManager | None = None,
        *,
        metadata_mode: MetadataMode = MetadataMode.LLM,
        metadata_key: str | None = None,
    ) -> None:
        super().__init__(llm, callback_manager, metadata_mode, metadata_key)
        self._stages = stages

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        last = deque(self._loading(query_bundle.query_str), maxlen=1)
        found = last.pop() if last else []
        self._prefetch(found)
        return found

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found, stages = list[NodeWithScore](), self._loading(query_bundle.query_str)
        while (more := await asyncio.to_thread(next, stages, None)) is not None:
            found = more
        await asyncio.to_thread(self._prefetch, found)
        return found

    def _loading(self, query: str) -> Iterator[list[NodeWithScore]]:
        """Yield the nodes of each stage, whose entries are loading then."""
        for hits in self._stages(query):
            found = [
                each
                if isinstance(each, NodeWithScore)
                else NodeWithScore(node=each[0], score=each[1])
                for each in hits
            ]
            self._prefetch(found, for_next_answer=False)
            yield found
