"""RagKVTransformer: the ingestion step that precomputes documents."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable

from langchain_ragkv.binding import engine_of
from langchain_ragkv.model import ChunkReuse
from langchain_ragkv.texts import chunk_texts
from ragkv import PrecomputeReport
from ragkv.answer.engine import Engine
from ragkv.ingest.documents import Documents, precompute_documents

_log = logging.getLogger(__name__)


class RagKVTransformer(BaseDocumentTransformer):
    """Encodes and stores every document's chunk cache; returns the documents unchanged.

    Parameters
    ----------
    llm
        The model that will answer: a ChatRagKV or RagKVLLM, also ``bind(...)`` of one.
    kv
        Its engine, where there is no such model.
    document_prompt
        How the chain renders a document, as in ``create_stuff_documents_chain``; None
        is its ``page_content``.
    show_progress, neighbours
        As in :meth:`ChatRagKV.precompute`.
    by_document
        Store each chunk under the source document that ``metadata["source"]`` names, or another
        field. All of a document's chunks then come in one call: its previous chunks are deleted,
        unless another document has them, and ``llm.kv.forget(document=source)`` deletes them all.

    Raises
    ------
    ConfigError
        Neither or both of ``llm`` and ``kv`` are given, or ``llm`` is another model.
    """

    def __init__(
        self,
        *,
        llm: ChunkReuse | Runnable[Any, Any] | None = None,
        kv: Engine | None = None,
        document_prompt: BasePromptTemplate[str] | None = None,
        show_progress: bool | None = None,
        neighbours: bool = False,
        by_document: bool | str = False,
    ) -> None:
        self._engine, self._bound = engine_of(llm, kv)
        self._source_key = "source" if by_document is True else by_document or None
        self._document_prompt = document_prompt
        self._given = {"show_progress": show_progress, "neighbours": neighbours}

    def transform_documents(
        self,
        documents: Sequence[Document],
        **kwargs: Any,  # noqa: ARG002
    ) -> Sequence[Document]:
        """Precompute the documents and return them as they came."""
        texts = chunk_texts(documents, self._document_prompt)
        by_source: dict[tuple[str, str | None] | None, list[str]] = {}
        for document, text in zip(documents, texts, strict=True):
            source = document.metadata.get(self._source_key) if self._source_key else None
            by_source.setdefault(None if source is None else (str(source), None), []).append(text)
        report = self.precompute(by_source)
        _log.info("precomputed %d chunks, %d were there", report.new, report.existing)
        return documents

    def precompute(self, documents: Documents) -> PrecomputeReport:
        """Encode the chunks of documents."""
        given = {**self._given, **self._bound}
        return precompute_documents(self._engine.precompute, documents, **given)

    def forget(self, document: str) -> None:
        """Delete a document's chunks that no other document has."""
        kv = self._engine.kv if isinstance(self._engine, ChunkReuse) else self._engine
        kv.forget(document=document)
