"""RagKVTransform: the ingestion step that computes every node's cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self
from uuid import uuid4

from llama_index.core.bridge.pydantic import BaseModel, PrivateAttr
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.llms.ragkv.base import RagKVLLM
from llama_index.llms.ragkv.retriever import rendered_texts
from llama_index.llms.ragkv.source import EngineSource

from ragkv.errors import ConfigError


class RagKVTransform(TransformComponent):
    """Precomputes the KV cache of every node, as the LLM will read it.

    Put it last in ``IngestionPipeline(transformations=[...])``: it takes nodes as they
    are and returns them unchanged. With ``num_workers`` each worker process loads the
    model for itself and writes to the LLM's store.

    It runs whenever nodes come to it: a pipeline's cache cannot know whether the store still
    holds what was computed, so no entry of that cache is ever found for this step, and what is
    stored is not computed again. The cache keeps one more copy of the nodes for each run;
    ``IngestionPipeline(disable_cache=True)`` keeps none, nor does
    ``RagKVTransform(llm=llm)(pipeline.run(...))``. What a pipeline's docstore holds back does
    not come here: after the store was emptied, give the step those nodes yourself, or wrap
    the retriever in :class:`RagKVRetriever`, which has missing chunks stored after an answer.

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
    metadata_mode
        Which metadata the prompt has before a node's text. Response synthesizers write those
        of ``MetadataMode.LLM``; ``CitationQueryEngine`` and ``FaithfulnessEvaluator`` write
        ``NONE``. To precompute both, take two steps (without ``by_document``, by which the
        second would remove what the first has entered).
    metadata_key
        Precompute what stands in this field of a node's metadata instead of its text:
        ``"window"`` for nodes of ``SentenceWindowNodeParser`` that
        ``MetadataReplacementPostProcessor("window")`` will replace.
    """

    show_progress: bool = False
    by_document: bool = False
    expires_in: float | None = None
    metadata_mode: MetadataMode = MetadataMode.LLM
    metadata_key: str | None = None

    _source: EngineSource = PrivateAttr()
    _overrides: dict[str, Any] = PrivateAttr()

    def __init__(
        self,
        llm: RagKVLLM,
        *,
        show_progress: bool = False,
        by_document: bool = False,
        expires_in: float | None = None,
        metadata_mode: MetadataMode = MetadataMode.LLM,
        metadata_key: str | None = None,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            show_progress=show_progress,
            by_document=by_document,
            expires_in=expires_in,
            metadata_mode=metadata_mode,
            metadata_key=metadata_key,
        )
        self._source = llm.source
        self._overrides = llm.reuse_overrides

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex writes into serialised pipelines."""
        return "RagKVTransform"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the settings and a ``run`` that never comes again: pipelines hash this."""
        return {**super().to_dict(**kwargs), "run": uuid4().hex}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """Make the step again with ``llm=...``, which is not written.

        Raises
        ------
        ConfigError
            Without an ``llm``.
        """
        if "llm" not in kwargs:
            raise ConfigError("to_dict() does not write the LLM: from_dict(data, llm=...)")
        return super().from_dict({key: data[key] for key in data if key != "run"}, **kwargs)

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Compute what is not stored yet and return the nodes as they are."""
        del kwargs
        documents: dict[str | None, list[BaseNode]] = {}
        for node in nodes:
            document = node.ref_doc_id if self.by_document else None
            documents.setdefault(document, []).append(node)
        for document, held in documents.items():
            self._source.get().precompute(
                rendered_texts(held, self.metadata_mode, self.metadata_key),
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
