"""Deletions by LangChain's ``index`` and by document reach the chunk caches."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.prompts import PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_ragkv import ChatRagKV, RagKVTransformer, RagKVVectorStore
from tiny import some_chunks

from ragkv import RagKV
from ragkv.errors import ConfigError

A, B, C, D = some_chunks(4)


def of(source: str, *texts: str) -> list[Document]:
    return [Document(page_content=text, metadata={"source": source}) for text in texts]


class Corpus:
    """One vector store, its record manager and the engine."""

    def __init__(self, kv: RagKV) -> None:
        self.kv = kv
        self.inner = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
        self.store = RagKVVectorStore(self.inner, llm=ChatRagKV(kv=kv), show_progress=False)
        self.records = InMemoryRecordManager(namespace="test")
        self.records.create_schema()

    def index(self, documents: list[Document], cleanup: Any, *, wait: bool = False) -> Any:
        given = (documents, self.records, self.store)
        settings = {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256"}
        if wait:
            return asyncio.run(aindex(*given, **settings))
        return index(*given, **settings)

    @property
    def kept(self) -> list[bool]:
        return [self.kv.contains(text) for text in (A, B, C, D)]


def test_every_search_is_the_vector_store_s(corpus):
    corpus.store.add_documents(of("one", A, B))
    vector = corpus.inner.embeddings.embed_query("x")
    for way in ("similarity_search_with_score", "max_marginal_relevance_search"):
        ours, theirs = (getattr(each, way)("x", k=1) for each in (corpus.store, corpus.inner))
        assert ours == theirs == asyncio.run(getattr(corpus.store, f"a{way}")("x", k=1))
    for way in ("similarity_search_by_vector", "max_marginal_relevance_search_by_vector"):
        assert len(getattr(corpus.store, way)(vector, k=1)) == 1
    assert len(corpus.store.search("x", "mmr")) == 2


@pytest.fixture
def corpus(make_engine: Callable[..., RagKV]) -> Corpus:
    return Corpus(make_engine())


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("cleanup", ["full", "incremental", "scoped_full"])
def test_a_changed_document_loses_the_chunks_that_it_no_longer_has(corpus, cleanup, *, wait):
    corpus.index([*of("one", A, B), *of("two", B, C)], cleanup, wait=wait)
    assert corpus.kept == [True, True, True, False]
    found = corpus.index([*of("one", D), *of("two", B, C)], cleanup, wait=wait)
    assert (found["num_added"], found["num_deleted"]) == (1, 2)
    assert corpus.kept == [False, True, True, True]  # B is the other document's, too
    corpus.index(of("two", C), cleanup, wait=wait)
    assert corpus.kept == [False, False, True, cleanup != "full"]
    assert len(corpus.store.get_by_ids(list(corpus.inner.store))) == len(corpus.inner.store)


def test_full_cleanup_of_everything_empties_the_store(corpus):
    corpus.index([*of("one", A, B), *of("two", C)], "full")
    corpus.index([], "full")
    assert corpus.kept == [False] * 4
    assert not list(corpus.kv._store.texts())


def test_ids_are_deleted_by_hand_and_search_is_the_vector_store_s(corpus):
    store = corpus.store
    ids = store.add_documents(of("one", A, B))
    store.add_documents(of("two", A), ids=["x"])
    assert store.similarity_search(A, k=1)[0].page_content == A
    retriever = store.as_retriever(search_type="mmr", search_kwargs={"k": 1})
    assert retriever.invoke(A)[0].page_content == A
    store.delete(ids)
    assert corpus.kept == [True, False, False, False]
    asyncio.run(store.adelete(["x", "never there"]))
    assert corpus.kept == [False] * 4


def test_chunks_are_rendered_as_the_chain_will(make_engine):
    kv = make_engine()
    prompt = PromptTemplate.from_template("{source}: {page_content}")
    inner = InMemoryVectorStore(DeterministicFakeEmbedding(size=8))
    RagKVVectorStore(inner, kv=kv, document_prompt=prompt).add_documents(of("one", A))
    assert kv.contains(f"one: {A}")
    with pytest.raises(ConfigError, match="either llm"):
        RagKVVectorStore(inner)
    with pytest.raises(NotImplementedError, match="make the vector store first"):
        RagKVVectorStore.from_texts([A])


@pytest.mark.parametrize("key", ["source", "page"])
def test_the_transformer_knows_documents(corpus, key):
    by_document = True if key == "source" else key
    step = RagKVTransformer(kv=corpus.kv, by_document=by_document, show_progress=False)

    def ingest(name, *texts):
        documents = [Document(page_content=text, metadata={key: name}) for text in texts]
        step.transform_documents(documents)

    ingest("one", A, B)
    ingest("two", B)
    step.transform_documents([Document(page_content=D)])  # of no document
    ingest("one", C)
    assert corpus.kept == [False, True, True, True]
    assert corpus.kv.forget(document="one") == 1
    assert corpus.kv.forget(document="two") == 1
    assert corpus.kept == [False, False, False, True]
