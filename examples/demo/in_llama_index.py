"""The demo's pipeline in LlamaIndex: vector index, query engine, RagKVLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core import ChatPromptTemplate, VectorStoreIndex, get_response_synthesizer
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode
from llama_index.llms.ragkv import RagKVLLM, RagKVPromptHelper, RagKVRetriever, RagKVTransform
from texts import SYSTEM, USER

from ragkv import RagKV
from ragkv.cli.retrieval import Embedder


class _Embedding(BaseEmbedding):
    """The demo's embedder, in LlamaIndex's interface."""

    _embedder: Embedder = PrivateAttr()

    def __init__(self, embedder: Embedder) -> None:
        super().__init__(model_name="all-MiniLM-L6-v2")
        self._embedder = embedder

    def _get_text_embedding(self, text: str) -> list[float]:
        return [float(x) for x in self._embedder.embed([text])[0]]

    _get_query_embedding = _get_text_embedding

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


def pipeline(
    kv: RagKV, chunks: Sequence[str], embedder: Embedder, top_k: int, answer_tokens: int
) -> Callable[[str, str], dict[str, Any]]:
    """Ingest; return ``ask(question, method)``: the engine's report with the answer's text."""
    user = USER.replace("{context}", "{context_str}").replace("{question}", "{query_str}")
    prompt = ChatPromptTemplate.from_messages([("system", SYSTEM), ("user", user)])
    llm = RagKVLLM(kv=kv, is_chat_model=True, max_new_tokens=answer_tokens, sink_from=prompt)
    nodes = [TextNode(text=chunk) for chunk in chunks]
    nodes = IngestionPipeline(transformations=[RagKVTransform(llm)]).run(nodes=nodes)
    plain = VectorStoreIndex(nodes, embed_model=_Embedding(embedder)).as_retriever(
        similarity_top_k=top_k
    )
    loading = RagKVRetriever(plain, llm)
    synthesizer = get_response_synthesizer(
        llm=llm, text_qa_template=prompt, prompt_helper=RagKVPromptHelper.from_llm(llm)
    )

    def ask(question: str, method: str) -> dict[str, Any]:
        llm.method = method
        retriever = plain if method == "full" else loading
        engine = RetrieverQueryEngine(retriever=retriever, response_synthesizer=synthesizer)
        return {"text": str(engine.query(question)), **llm.last_report.to_dict()}

    return ask
