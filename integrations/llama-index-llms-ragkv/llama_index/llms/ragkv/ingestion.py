"""RagKVTransform: the ingestion step that computes every node's cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from llama_index.core.bridge.pydantic import BaseModel, PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.llms.ragkv.base import RagKVLLM
from llama_index.llms.ragkv.engine import EngineSource
from llama_index.llms.ragkv.serialisation import OverLLM
from llama_index.llms.ragkv.texts import rendered_texts

from ragkv.config import check_known
from ragkv.ingest.documents import precompute_documents


class RagKVTransform(OverLLM, TransformComponent):
    """Precomputes the KV cache of every node.

    Put it last in ``IngestionPipeline(transformations=[...])``: it returns nodes unchanged. With
    ``num_workers`` each worker process loads the model and writes to the LLM's store.

    The step is never served from a pipeline's cache, which cannot know whether the store still
    has the chunks; stored chunks are not computed again. That cache keeps one more copy of the
    nodes for each run, unless it is off: ``IngestionPipeline(disable_cache=True)``, or
    ``RagKVTransform(llm=llm)(pipeline.run(...))``. Nodes that a pipeline's docstore filters out
    do not come here: after the store was emptied, give the step those nodes directly, or wrap
    the retriever in :class:`RagKVRetriever`, which stores missing chunks after an answer.

    Parameters
    ----------
    llm
        The LLM that will answer. Worker processes take its model's specification.

    Attributes
    ----------
    show_progress
        True shows a bar and the chunks' size, False nothing; None shows the bar in a
        terminal, and lines with the time left elsewhere.
    by_document
        Store each node's chunk under its source document (``ref_doc_id``). Chunks of the document
        as it was before, by the hash that its nodes have of it, are deleted; so its nodes may come
        in several calls, as in worker processes. Where nodes have no such hash, those of one call
        are the whole document, and worker processes delete nothing.
        ``llm.kv.forget(document=ref_doc_id)`` deletes a document's chunks.
    expires_in
        Seconds until the chunks expire; None is for ever.
    neighbours
        Also compute each chunk behind the chunks before it, as :meth:`ragkv.RagKV.precompute`.
    metadata_mode
        The metadata in front of a node's text. Response synthesizers write those
        of ``MetadataMode.LLM``; ``CitationQueryEngine`` and ``FaithfulnessEvaluator`` write
        ``NONE``. To precompute both, use two steps, without ``by_document``.
    metadata_key
        Precompute this field of a node's metadata instead of its text:
        ``"window"`` for nodes of ``SentenceWindowNodeParser`` that
        ``MetadataReplacementPostProcessor("window")`` will replace.
    """

    show_progress: bool | None = None
    by_document: bool = False
    expires_in: float | None = None
    neighbours: bool = False
    metadata_mode: MetadataMode = MetadataMode.LLM
    metadata_key: str | None = None

    _source: EngineSource = PrivateAttr()
    _overrides: dict[str, Any] = PrivateAttr()
    _is_copy: bool = PrivateAttr(default=False)

    def __init__(self, llm: RagKVLLM, **settings: Any) -> None:
        check_known("argument", settings, type(self).model_fields)
        super().__init__(**settings)
        self._source = llm.source
        self._overrides = llm.reuse_overrides

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex writes into serialised pipelines."""
        return "RagKVTransform"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the settings and a unique ``run``: pipelines hash this."""
        return {**super().to_dict(**kwargs), "run": uuid4().hex}

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Encode the chunks that are not stored yet; return the nodes unchanged."""
        del kwargs
        documents: dict[tuple[str, str | None] | None, list[str]] = {}
        for node in nodes:
            texts = documents.setdefault(self._document_of(node), [])
            texts += rendered_texts([node], self.metadata_mode, self.metadata_key)
        settings: dict[str, Any] = {"expires_in": self.expires_in, **self._overrides}
        settings |= {"neighbours": self.neighbours, "show_progress": self.show_progress}
        precompute_documents(self._source.get().precompute, documents, **settings)
        return nodes

    def forget_document(self, document: str) -> None:
        """Delete a document's chunks that no other document has."""
        self._source.get().forget(document=document)

    def _document_of(self, node: BaseNode) -> tuple[str, str | None] | None:
        """Return a node's document and the revision that it was cut from."""
        source = node.source_node if self.by_document else None
        if source is None:
            return None
        return source.node_id, source.hash or ("" if self._is_copy else None)

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Do the same in a thread; the event loop goes on."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return BaseModel.__getstate__(self)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        BaseModel.__setstate__(self, state)
        self._is_copy = True  # in a worker process, which can see a part of a document
