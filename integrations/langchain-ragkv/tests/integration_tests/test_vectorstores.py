"""langchain-tests' suite of vector stores."""

from __future__ import annotations

import pytest
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_ragkv import ChatRagKV, RagKVVectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests
from standard import engine


class TestRagKVVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self):
        inner = InMemoryVectorStore(self.get_embeddings())
        return RagKVVectorStore(inner, llm=ChatRagKV(kv=engine()))
