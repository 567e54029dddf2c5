"""The demo's pipeline in LangChain: vector store, retrieval chain, ChatRagKV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from answer import Answer
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.embeddings import Embeddings
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_ragkv import ChatRagKV, RagKVRetriever
from questions import SYSTEM, USER

if TYPE_CHECKING:
    from ragkv import RagKV
    from ragkv.cli.retrieval import Embedder


class _Embeddings(Embeddings):
    """The demo's embedder, as LangChain wants it."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [[float(x) for x in row] for row in self._embedder.embed(texts)]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


class _Account(BaseCallbackHandler):
    """Keeps the model's account, which the chain's output parser drops."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = {}

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:  # noqa: ARG002
        message: Any = response.generations[0][0]
        self.report = message.message.response_metadata["ragkv"]


class LangChainPipeline:
    """Ingestion, and retrieval chains that differ in the method alone."""

    def __init__(
        self,
        kv: RagKV,
        chunks: Sequence[str],
        embedder: Embedder,
        *,
        top_k: int,
        answer_tokens: int,
    ) -> None:
        user = USER.replace("{question}", "{input}")
        self._prompt = ChatPromptTemplate.from_messages([("system", SYSTEM), ("user", user)])
        self._llm = ChatRagKV(kv=kv, max_tokens=answer_tokens, sink_from=self._prompt)
        self._llm.precompute(chunks)
        store = InMemoryVectorStore.from_texts(list(chunks), _Embeddings(embedder))
        self._plain = store.as_retriever(search_kwargs={"k": top_k})
        self._retriever = RagKVRetriever(retriever=self._plain, llm=self._llm)

    def ask(self, question: str, method: str) -> Answer:
        """Answer through a retrieval chain around the model with the given method."""
        answer = create_stuff_documents_chain(self._llm.bind(method=method), self._prompt)
        retriever = self._plain if method == "full" else self._retriever
        chain = create_retrieval_chain(retriever, answer)
        account = _Account()
        text = chain.invoke({"input": question}, config={"callbacks": [account]})["answer"]
        return Answer.of(text, self._llm.kv.tokenizer, account.report)
