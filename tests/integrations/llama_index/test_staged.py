"""RagKVStagedRetriever: the query engine's prompt is computed while retrieval goes on."""

from __future__ import annotations

import asyncio

import faiss
import numpy as np
import pytest
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.ragkv import RagKVLLM, RagKVPromptHelper, RagKVStagedRetriever
from pausing import speculating_threads
from tiny import some_chunks

from ragkv.retrieve.staged import StagedSearch

NODES = [TextNode(text=text, metadata={"page": i}) for i, text in enumerate(some_chunks(8))]
VECTORS = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
QUESTION = "What is a target list?"
OWN = PromptTemplate("Read this.\n{context_str}\nThen say: {query_str}")


@pytest.fixture(scope="module")
def search():
    index = faiss.index_factory(16, "HNSW4", faiss.METRIC_INNER_PRODUCT)
    index.add(VECTORS)
    index.hnsw.efSearch = 32
    return StagedSearch(index, NODES, lambda _: VECTORS[0] + VECTORS[1], k=3, steps=3)


def query_engine(search, llm, template=None):
    retriever = RagKVStagedRetriever(search, llm, text_qa_template=template)
    helper = RagKVPromptHelper.from_llm(llm)
    synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper, text_qa_template=template)
    return retriever, RetrieverQueryEngine(retriever, synthesizer)


@pytest.mark.parametrize("template", [None, OWN], ids=["default", "own"])
@pytest.mark.parametrize("is_chat_model", [False, True])
def test_a_query_engine_is_served_from_it(is_chat_model, template, make_engine, search):
    kv = make_engine()
    llm = RagKVLLM(kv=kv, is_chat_model=is_chat_model, max_new_tokens=6, context_window=4000)
    retriever, engine = query_engine(search, llm, template)
    found = retriever.retrieve(QUESTION)
    *_, last = search(QUESTION)
    assert [each.node for each in found] == [hit.item for hit in last]
    assert [each.score for each in found] == [hit.score for hit in last]
    for thread in speculating_threads():
        thread.join(30)
    answer = engine.synthesize(QUESTION, found)
    assert kv.status().speculations.used == 1
    assert llm.last_report.ahead_s > 0
    cold = make_engine()
    plain = RagKVLLM(kv=cold, is_chat_model=is_chat_model, max_new_tokens=6, context_window=4000)
    _, expected = query_engine(search, plain, template)
    assert str(answer) == str(expected.synthesize(QUESTION, found))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_whole_query(asynchronous, make_engine, search):
    kv = make_engine()
    llm = RagKVLLM(kv=kv, max_new_tokens=6, context_window=4000)
    _, engine = query_engine(search, llm)
    answer = asyncio.run(engine.aquery(QUESTION)) if asynchronous else engine.query(QUESTION)
    assert len(answer.source_nodes) == 3
    report = kv.status().speculations
    assert report.used + report.cancelled == report.started >= 1
    assert kv._requests.nbytes == 0


def test_nodes_with_scores_and_names(make_engine):
    kv = make_engine()
    found = [NodeWithScore(node=node, score=1.0) for node in NODES[:2]]
    retriever = RagKVStagedRetriever(lambda _: [found], RagKVLLM(kv=kv))
    assert retriever.retrieve(QUESTION) == found
    kv.wait()
    assert len(kv._reuse.background.named) == 2
