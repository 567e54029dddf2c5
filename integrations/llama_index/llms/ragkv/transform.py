"""RagKVTransform: the ingestion step that computes every node's cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr
from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.llms.ragkv.base import RagKVLLM
from llama_index.llms.ragkv.retriever import rendered_texts
from llama_index.llms.ragkv.source import EngineSource


class RagKVTransform(TransformComponent):
    """Precomputes the KV cache of every node, as the LLM will read it.

    Put it last in ``IngestionPipeline(transformations=[...])``: it takes nodes as they
    are and returns them unchanged. With ``num_workers`` each worker process loads the
    model for itself and writes to the LLM's store. The pipeline's own cache and docstore
    may skip it on a second run; what is missing then is made up after the first answer.

    Parameters
    ----------
    llm
        The LLM that will answer. Worker processes take its model's specification.
    show_progress
        Show a progress bar.
    by_document
        Enter each node's chunk under its source document (``ref_doc_id``). All nodes of a
        document then have to come in one run, as a pipeline's docstore sees to: chunks that
        the document held before and holds no longer are removed, and
        ``llm.kv.forget_document(ref_doc_id)`` removes them all.
    expires_in
        Seconds from now on after which the chunks are no longer used; None is for ever.
    """

    model_name: str = Field(description="With the next three: the pipeline's cache key.")
    sink: str
    namespace: str
    store: str
    by_document: bool = False
    show_progress: bool = Field(default=False, exclude=True)
    expires_in: float | None = Field(default=None, exclude=True)

    _source: EngineSource = PrivateAttr()
    _overrides: dict[str, Any] = PrivateAttr()

    def __init__(
        self,
        llm: RagKVLLM,
        *,
        show_progress: bool = False,
        by_document: bool = False,
        expires_in: float | None = None,
    ) -> None:
        source = llm.source
        super().__init__(  # type: ignore[call-arg]
            model_name=llm.model_name,
            sink=source.reuse.sink,
            namespace=llm.kv.namespace,
            store=str(source.store),
            by_document=by_document,
            show_progress=show_progress,
            expires_in=expires_in,
        )
        self._source = source
        self._overrides = llm.reuse_overrides

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex writes into serialised pipelines."""
        return "RagKVTransform"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Compute what is not stored yet and return the nodes as they are."""
        del kwargs
        documents: dict[str | None, list[BaseNode]] = {}
        for node in nodes:
            document = node.ref_doc_id if self.by_document else None
            documents.setdefault(document, []).append(node)
        for document, held in documents.items():
            self._source.get().precompute(
                rendered_texts(held),
                document=document,
                expires_in=self.expires_in,
                show_progress=self.show_progress,
                **self._overrides,
            )
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Do the same in a thread; the event loop goes on."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return BaseModel.__getstate__(self)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        BaseModel.__setstate__(self, state)
