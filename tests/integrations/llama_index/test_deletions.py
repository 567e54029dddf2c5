"""Deletions in LlamaIndex reach the chunk caches."""

import asyncio
from typing import Any

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import Document
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.ragkv import RagKVLLM, RagKVTransform, RagKVVectorStore
from tiny import some_chunks

from ragkv import RagKV

A, B, C, D = some_chunks(4)
SPLITTER = SentenceSplitter(chunk_size=400)


def of(name: str, text: str) -> Document:
    return Document(text=text, id_=name)


@pytest.fixture
def store(kv: RagKV) -> RagKVVectorStore:
    return RagKVVectorStore(SimpleVectorStore(), RagKVLLM(kv=kv), show_progress=False)


def kept(kv: RagKV) -> list[bool]:
    return [kv.contains(text) for text in (A, B, C, D)]


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize(
    "strategy", [DocstoreStrategy.UPSERTS, DocstoreStrategy.UPSERTS_AND_DELETE]
)
def test_a_pipeline_s_upserts_and_deletions(kv, store, strategy, *, step, wait):
    """With a step of its own in the pipeline, or by the vector store alone."""
    steps: list[Any] = [SPLITTER, MockEmbedding(embed_dim=4)]
    if step:
        steps.append(RagKVTransform(llm=RagKVLLM(kv=kv), by_document=True, show_progress=False))
    pipeline = IngestionPipeline(
        transformations=steps,
        docstore=SimpleDocumentStore(),
        vector_store=store,
        docstore_strategy=strategy,
    )

    def run(*documents):
        if wait:
            asyncio.run(pipeline.arun(documents=list(documents)))
        else:
            pipeline.run(documents=list(documents))

    run(of("one", A), of("two", B), of("three", B))
    assert kept(kv) == [True, True, False, False]
    run(of("one", C), of("two", D), of("three", B))  # changed
    assert kept(kv) == [False, True, True, True]
    run(of("two", D))
    deletes = strategy is DocstoreStrategy.UPSERTS_AND_DELETE
    assert kept(kv) == [False, not deletes, not deletes, True]


@pytest.mark.parametrize("wait", [False, True])
def test_an_index_s_deletions(kv, store, *, wait):
    index = VectorStoreIndex.from_documents(
        [of("one", A), of("two", B), of("three", B)],
        storage_context=StorageContext.from_defaults(vector_store=store),
        embed_model=MockEmbedding(embed_dim=4),
        transformations=[SPLITTER],
    )
    assert kept(kv) == [True, True, False, False]

    def delete(name):
        if wait:
            asyncio.run(index.adelete_ref_doc(name, delete_from_docstore=True))
        else:
            index.delete_ref_doc(name, delete_from_docstore=True)

    delete("one")
    delete("two")
    assert kept(kv) == [False, True, False, False]  # B is the third document's, too
    index.insert(of("four", C))
    index.update_ref_doc(of("four", D))
    index.refresh_ref_docs([of("three", A), of("four", D)])
    assert kept(kv) == [True, False, False, True]
    assert index.as_retriever(similarity_top_k=2).retrieve("x")


def test_the_vector_store_answers_as_the_one_within(kv, store):
    from llama_index.core.vector_stores.types import VectorStoreQuery

    nodes = SPLITTER([of("one", A)])
    for node in nodes:
        node.embedding = [1.0, 0.0]
    assert asyncio.run(store.async_add(nodes)) == [node.node_id for node in nodes]
    query = VectorStoreQuery(query_embedding=[1.0, 0.0], similarity_top_k=1)
    assert store.query(query).ids == asyncio.run(store.aquery(query)).ids == [nodes[0].node_id]
    assert store.client is None
    assert not store.stores_text
    store.delete_nodes([nodes[0].node_id])
    assert not store.query(query).ids
    assert kv.contains(A)
    store.clear()
    with pytest.raises(NotImplementedError):
        store.get_nodes([])
