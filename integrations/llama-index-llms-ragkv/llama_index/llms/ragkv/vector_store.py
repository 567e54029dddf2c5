"""RagKVVectorStore: a vector store whose chunk caches come and go with its documents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.llms.ragkv.base import RagKVLLM
from llama_index.llms.ragkv.ingestion import RagKVTransform


class RagKVVectorStore(BasePydanticVectorStore):
    """A vector store; the caches of its nodes are computed and deleted with them.

    Deletions of whole documents are followed: ``index.delete_ref_doc``, ``update_ref_doc`` and
    ``refresh_ref_docs``, and those of an ``IngestionPipeline`` with a docstore
    (``UPSERTS``, ``UPSERTS_AND_DELETE``). A text that stands in several documents stays until the
    last of them is deleted. ``delete_nodes`` and ``clear`` leave the caches.

    Parameters
    ----------
    vector_store
        The vector store that has the nodes.
    llm
        The LLM that will answer.
    **settings
        Those of :class:`RagKVTransform`, such as ``metadata_mode``.
    """

    stores_text: bool = False

    _inner: BasePydanticVectorStore = PrivateAttr()
    _step: RagKVTransform = PrivateAttr()

    def __init__(
        self, vector_store: BasePydanticVectorStore, llm: RagKVLLM, **settings: Any
    ) -> None:
        super().__init__(
            stores_text=vector_store.stores_text,
            is_embedding_query=vector_store.is_embedding_query,
        )
        self._inner = vector_store
        self._step = RagKVTransform(llm, **{"by_document": True, **settings})

    @property
    def client(self) -> Any:
        """The vector store's client."""
        return self._inner.client

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Precompute the nodes' chunks, those that a pipeline did not, and add the nodes."""
        self._step(nodes)
        return self._inner.add(nodes, **kwargs)

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Do the same; the event loop goes on."""
        await self._step.acall(nodes)
        return await self._inner.async_add(nodes, **kwargs)

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes, and its chunks that no other document has."""
        self._inner.delete(ref_doc_id, **delete_kwargs)
        self._step.forget_document(ref_doc_id)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Do the same; the event loop goes on."""
        await self._inner.adelete(ref_doc_id, **delete_kwargs)
        await asyncio.to_thread(self._step.forget_document, ref_doc_id)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the vector store."""
        return self._inner.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Query the vector store."""
        return await self._inner.aquery(query, **kwargs)

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Return the vector store's nodes."""
        return self._inner.get_nodes(node_ids, filters)

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete nodes; their caches stay until the document is deleted or ingested again."""
        self._inner.delete_nodes(node_ids, filters, **delete_kwargs)

    def clear(self) -> None:
        """Empty the vector store; caches stay."""
        self._inner.clear()

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Save the vector store."""
        self._inner.persist(persist_path, fs)
