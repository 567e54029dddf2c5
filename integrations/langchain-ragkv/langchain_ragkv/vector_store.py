"""RagKVVectorStore: a vector store whose chunk caches come and go with its documents."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import run_in_executor
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever

from langchain_ragkv.ingestion import RagKVTransformer
from langchain_ragkv.model import ChunkReuse
from langchain_ragkv.texts import chunk_texts
from ragkv.answer.engine import Engine

_log = logging.getLogger(__name__)


def _forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls the vector store's own of this name."""

    def search(self: RagKVVectorStore, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.vector_store, name)(*args, **kwargs)

    search.__name__ = name
    return search


class RagKVVectorStore(VectorStore):
    """Writes to a vector store; precomputes added documents, and deletes caches with theirs.

    Give it to ``langchain_core.indexing.index`` in the vector store's place, with any ``cleanup``.
    Each id is a document of ragkv's store, so a text that stands under several ids stays until
    the last of them is deleted. Searches go to the vector store itself.

    Parameters
    ----------
    vector_store
        Any vector store that deletes by id.
    llm, kv, document_prompt, show_progress, neighbours
        As for :class:`RagKVTransformer`.
    """

    def __init__(
        self,
        vector_store: VectorStore,
        *,
        llm: ChunkReuse | Runnable[Any, Any] | None = None,
        kv: Engine | None = None,
        document_prompt: BasePromptTemplate[str] | None = None,
        show_progress: bool | None = None,
        neighbours: bool = False,
    ) -> None:
        self.vector_store = vector_store
        self._step = RagKVTransformer(
            llm=llm, kv=kv, show_progress=show_progress, neighbours=neighbours
        )
        self._document_prompt = document_prompt

    @property
    def embeddings(self) -> Embeddings | None:
        """The vector store's."""
        return self.vector_store.embeddings

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents and precompute their chunks; return their ids."""
        ids = self.vector_store.add_documents(documents, **kwargs)
        self._precompute(documents, ids)
        return ids

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Do the same; the event loop goes on."""
        ids = await self.vector_store.aadd_documents(documents, **kwargs)
        await run_in_executor(None, self._precompute, documents, ids)
        return ids

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents, and the chunks that stand under no other id."""
        deleted = self.vector_store.delete(ids, **kwargs)
        self._forget(ids, deleted=deleted)
        return deleted

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Do the same; the event loop goes on."""
        deleted = await self.vector_store.adelete(ids, **kwargs)
        await run_in_executor(None, lambda: self._forget(ids, deleted=deleted))
        return deleted

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the vector store's documents."""
        return self.vector_store.get_by_ids(ids)

    similarity_search = _forwarded("similarity_search")
    similarity_search_with_score = _forwarded("similarity_search_with_score")
    similarity_search_with_relevance_scores = _forwarded("similarity_search_with_relevance_scores")
    similarity_search_by_vector = _forwarded("similarity_search_by_vector")
    max_marginal_relevance_search = _forwarded("max_marginal_relevance_search")
    max_marginal_relevance_search_by_vector = _forwarded("max_marginal_relevance_search_by_vector")
    asimilarity_search = _forwarded("asimilarity_search")
    asimilarity_search_with_score = _forwarded("asimilarity_search_with_score")
    asimilarity_search_with_relevance_scores = _forwarded(
        "asimilarity_search_with_relevance_scores"
    )
    asimilarity_search_by_vector = _forwarded("asimilarity_search_by_vector")
    amax_marginal_relevance_search = _forwarded("amax_marginal_relevance_search")

    def as_retriever(self, **kwargs: Any) -> VectorStoreRetriever:
        """Return the vector store's own retriever."""
        return self.vector_store.as_retriever(**kwargs)

    @classmethod
    def from_texts(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse: this class wraps a vector store that exists."""
        raise NotImplementedError("make the vector store first, then RagKVVectorStore(it, llm=llm)")

    def _precompute(self, documents: Sequence[Document], ids: Sequence[str]) -> None:
        texts = chunk_texts(documents, self._document_prompt)
        self._step.precompute(
            {(str(key), None): [text] for key, text in zip(ids, texts, strict=True)}
        )

    def _forget(self, ids: Sequence[str] | None, *, deleted: bool | None) -> None:
        if ids is None:
            _log.warning("the vector store was emptied: chunk caches stay where no ids are given")
        for id_ in ids or () if deleted is not False else ():
            self._step.forget(str(id_))
