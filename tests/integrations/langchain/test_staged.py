"""RagKVStagedRetriever: the chain's prompt is computed while retrieval goes on."""

from __future__ import annotations

import asyncio
import copy

import faiss
import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_ragkv import ChatRagKV, RagKVLLM, RagKVStagedRetriever
from pausing import speculating_threads
from tiny import some_chunks

from ragkv.client import RemoteRagKV
from ragkv.errors import ConfigError
from ragkv.retrieve.following import follow
from ragkv.retrieve.staged import StagedSearch

DOCUMENTS = [Document(text, metadata={"page": i}) for i, text in enumerate(some_chunks(8))]
PROMPT = ChatPromptTemplate.from_messages([("system", "{context}"), ("human", "{input}")])
TEXT = PromptTemplate.from_template("Read this.\n{context}\n{input}")
EMBEDDINGS = DeterministicFakeEmbedding(size=16)
QUESTION = "What is a target list?"


@pytest.fixture(scope="module")
def search():
    vectors = np.array(EMBEDDINGS.embed_documents([each.page_content for each in DOCUMENTS]))
    index = faiss.index_factory(16, "IVF2,Flat")
    index.train(vectors.astype(np.float32))
    index.add(vectors.astype(np.float32))
    index.nprobe = 2
    return StagedSearch(index, DOCUMENTS, EMBEDDINGS.embed_query, k=3, steps=2)


def joined(documents):
    return "\n\n".join(each.page_content for each in documents)


def prompt_with(template):
    return lambda query, found: template.invoke({"context": joined(found), "input": query})


def chain(retriever, template, llm):
    return {"context": retriever | joined, "input": RunnablePassthrough()} | template | llm


def made(kind, kv, max_tokens=6):
    if kind == "text":
        return RagKVLLM(kv=kv, max_tokens=max_tokens), TEXT
    llm = ChatRagKV(kv=kv, max_tokens=max_tokens, sink_from=PROMPT)
    return (llm.bind(recompute_ratio=0.5) if kind == "bound" else llm), PROMPT


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["chat", "bound", "text"])
def test_a_chain_is_served_from_it(kind, asynchronous, make_engine, search):
    kv, cold = make_engine(), make_engine()
    for each in (kv, cold):
        made("text" if kind == "text" else "chat", each)[0].precompute(DOCUMENTS)
    llm, template = made(kind, kv)
    retriever = RagKVStagedRetriever(stages=search, llm=llm, prompt=prompt_with(template))
    asked = chain(retriever, template, llm)
    answer = asyncio.run(asked.ainvoke(QUESTION)) if asynchronous else asked.invoke(QUESTION)
    *_, last = search(QUESTION)
    plain, _ = made(kind, cold)
    expected = (template | plain).invoke(
        {"context": joined([hit.item for hit in last]), "input": QUESTION}
    )
    assert getattr(answer, "content", answer) == getattr(expected, "content", expected)
    report = kv.status().speculations  # it is used, or had not begun yet
    assert report.used + report.cancelled == report.started >= 1
    assert kv._requests.nbytes == 0


def test_what_is_computed_in_time_is_used(make_engine, search):
    kv = make_engine()
    llm, _ = made("chat", kv)
    retriever = RagKVStagedRetriever(stages=search, llm=llm, prompt=prompt_with(PROMPT))
    found = retriever.invoke(QUESTION)
    *_, last = search(QUESTION)
    assert found == [hit.item for hit in last]
    for thread in speculating_threads():
        thread.join(30)
    (PROMPT | llm).invoke({"context": joined(found), "input": QUESTION})
    assert kv.status().speculations.used == 1
    assert llm.last_report.ahead_s > 0


def test_documents_without_scores_and_names(make_engine):
    kv = make_engine()
    llm, _ = made("chat", kv)

    def reranked(query):
        yield DOCUMENTS[:3]
        yield DOCUMENTS[2:4]

    retriever = RagKVStagedRetriever(stages=reranked, llm=llm, prompt=prompt_with(PROMPT))
    assert retriever.invoke(QUESTION) == DOCUMENTS[2:4]
    assert copy.deepcopy(retriever).llm is llm
    kv.wait()
    named = {text.strip() for text in kv._reuse.background.named}
    assert named == {each.page_content for each in DOCUMENTS[2:4]}


def test_a_model_in_this_process_is_needed(search):
    remote = RemoteRagKV("http://127.0.0.1:9")
    with remote, pytest.raises(ConfigError, match="prefetch"):
        follow(remote, [], str)
    with pytest.raises(ValueError, match="must be the ChatRagKV"):
        RagKVStagedRetriever(stages=search, llm=None, prompt=prompt_with(PROMPT))
