"""The demo's pipeline in LangChain: vector store, retrieval chain, ChatRagKV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.retrieval import create_retrieval_chain
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_ragkv import ChatRagKV, RagKVRetriever
from texts import SYSTEM, USER

from ragkv import RagKV
from ragkv.cli.retrieval import Embedder


class _Embeddings(Embeddings):
    """The demo's embedder, in LangChain's interface."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[float(x) for x in row] for row in self._embedder.embed(texts)]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def pipeline(
    kv: RagKV, chunks: Sequence[str], embedder: Embedder, top_k: int, answer_tokens: int
) -> Callable[[str, str], dict[str, Any]]:
    """Ingest; return ``ask(question, method)``: the engine's report with the answer's text."""
    user = USER.replace("{question}", "{input}")
    prompt = ChatPromptTemplate.from_messages([("system", SYSTEM), ("user", user)])
    llm = ChatRagKV(kv=kv, max_tokens=answer_tokens, sink_from=prompt)
    llm.precompute(chunks)
    store = InMemoryVectorStore.from_texts(list(chunks), _Embeddings(embedder))
    plain = store.as_retriever(search_kwargs={"k": top_k})
    loading = RagKVRetriever(retriever=plain, llm=llm)

    def ask(question: str, method: str) -> dict[str, Any]:
        answer = create_stuff_documents_chain(llm.bind(method=method), prompt)
        chain = create_retrieval_chain(plain if method == "full" else loading, answer)
        text = chain.invoke({"input": question})["answer"]
        return {"text": text, **llm.last_report.to_dict()}

    return ask
