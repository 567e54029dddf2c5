"""The demo's pipeline in LlamaIndex: vector index, query engine, RagKVLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from answer import Answer
from llama_index.core import ChatPromptTemplate, VectorStoreIndex, get_response_synthesizer
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode
from llama_index.llms.ragkv import RagKVLLM, RagKVPromptHelper, RagKVRetriever, RagKVTransform
from questions import SYSTEM, USER

if TYPE_CHECKING:
    from ragkv import RagKV
    from ragkv.cli.retrieval import Embedder


class _Embedding(BaseEmbedding):
    """The demo's embedder, as LlamaIndex wants it."""

    _embedder: Embedder = PrivateAttr()

    def __init__(self, embedder: Embedder) -> None:
        super().__init__(model_name="all-MiniLM-L6-v2")
        self._embedder = embedder

    def _get_text_embedding(self, text: str) -> list[float]:
        return [float(x) for x in self._embedder.embed([text])[0]]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class LlamaIndexPipeline:
    """Ingestion, and query engines that differ in the method alone."""

    def __init__(
        self,
        kv: RagKV,
        chunks: Sequence[str],
        embedder: Embedder,
        *,
        top_k: int,
        answer_tokens: int,
    ) -> None:
        user = USER.replace("{context}", "{context_str}").replace("{question}", "{query_str}")
        template = ChatPromptTemplate(
            message_templates=[
                ChatMessage(role=MessageRole.SYSTEM, content=SYSTEM),
                ChatMessage(role=MessageRole.USER, content=user),
            ]
        )
        self._llm = RagKVLLM(
            kv=kv, is_chat_model=True, max_new_tokens=answer_tokens, sink_from=template
        )
        nodes = IngestionPipeline(transformations=[RagKVTransform(self._llm)]).run(
            nodes=[TextNode(text=chunk) for chunk in chunks]
        )
        index = VectorStoreIndex(nodes, embed_model=_Embedding(embedder))
        self._synthesizer = get_response_synthesizer(
            llm=self._llm,
            text_qa_template=template,
            prompt_helper=RagKVPromptHelper.from_llm(self._llm),
        )
        self._plain = index.as_retriever(similarity_top_k=top_k)
        self._retriever = RagKVRetriever(self._plain, self._llm)

    def ask(self, question: str, method: str) -> Answer:
        """Answer through a query engine around the model with the given method."""
        self._llm.method = method
        retriever = self._plain if method == "full" else self._retriever
        engine = RetrieverQueryEngine(retriever=retriever, response_synthesizer=self._synthesizer)
        text = str(engine.query(question))
        report = self._llm.last_report
        return Answer.of(text, self._llm.kv.tokenizer, report.to_dict() if report else {})
