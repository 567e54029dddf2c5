"""langchain-tests' suite of retrievers."""

from __future__ import annotations

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_ragkv import RagKVRetriever
from langchain_tests.integration_tests import RetrieversIntegrationTests
from standard import engine
from tiny import some_chunks


class TestRagKVRetriever(RetrieversIntegrationTests):
    retriever_constructor = RagKVRetriever
    retriever_query_example = "What is a target?"

    @property
    def retriever_constructor_params(self):
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
        store.add_documents([Document(text) for text in some_chunks(5)])
        return {"retriever": store.as_retriever(search_kwargs={"k": 2}), "kv": engine()}
