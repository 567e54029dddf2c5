"""RagKVStagedRetriever: what each stage found is loading while the next one is searched."""

import asyncio
import copy
import threading

import pytest
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_ragkv import ChatRagKV, RagKVLLM, RagKVStagedRetriever
from tiny import some_chunks

from ragkv.ingest.corpus import Corpus

DOCUMENTS = [Document(text, metadata={"page": i}) for i, text in enumerate(some_chunks(8))]
TEXTS = [each.page_content for each in DOCUMENTS]
PROMPT = ChatPromptTemplate.from_messages([("system", "{context}"), ("human", "{input}")])
TEXT = PromptTemplate.from_template("Read this.\n{context}\n{input}")
QUESTION = "What is a target list?"


@pytest.fixture
def loaded(kv, monkeypatch):
    """Return the lists of chunks that the engine has loaded so far."""
    fetch, lists = Corpus.fetch, []

    def record(corpus, texts, sink):
        fetch(corpus, texts, sink)
        lists.append((list(texts), sink.ids.tolist()))

    monkeypatch.setattr(Corpus, "fetch", record)
    return lists


def retrieved(retriever, asynchronous):
    if asynchronous:
        return asyncio.run(retriever.ainvoke(QUESTION))
    return retriever.invoke(QUESTION)


def joined(documents):
    return "\n\n".join(each.page_content for each in documents)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", [ChatRagKV, RagKVLLM])
def test_a_chain_over_stages(kind, asynchronous, make):
    def search(_):
        yield [(each, 0.5) for each in DOCUMENTS[:2]]
        yield [(each, 0.7) for each in DOCUMENTS[1:4]]

    template = PROMPT if kind is ChatRagKV else TEXT
    llm = make(kind, max_tokens=2, sink_from=template)
    llm.precompute(DOCUMENTS)
    retriever = RagKVStagedRetriever(stages=search, llm=llm)
    chain = {"context": retriever | joined, "input": RunnablePassthrough()} | template | llm
    asyncio.run(chain.ainvoke(QUESTION)) if asynchronous else chain.invoke(QUESTION)
    assert [chunk.text for chunk in llm.last_report.chunks] == TEXTS[1:4]
    assert not llm.last_report.misses


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stage_is_loaded_while_the_next_is_searched(asynchronous, make, kv, loaded):
    sink = "A sink of its own.\n"
    llm = make(ChatRagKV, max_tokens=2).bind(sink=sink)

    def reranked(query):
        assert query == QUESTION
        yield DOCUMENTS[:3]
        kv.wait()
        assert [texts for texts, _ in loaded] == [TEXTS[:3]]
        yield [(each, 0.5) for each in DOCUMENTS[2:4]]

    retriever = RagKVStagedRetriever(stages=reranked, llm=llm)
    assert retrieved(retriever, asynchronous) == DOCUMENTS[2:4]
    kv.wait()
    assert [texts for texts, _ in loaded] == [TEXTS[:3], TEXTS[2:4], TEXTS[2:4]]
    behind = kv._reuse.corpus.sinks.configured(kv.reuse.override(sink=sink))
    assert all(ids == behind.ids.tolist() for _, ids in loaded)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_next_answer_accounts_for_the_last_stage_alone(asynchronous, make):
    llm = make(ChatRagKV, max_tokens=2)
    llm.precompute(DOCUMENTS)
    stages = [DOCUMENTS[:3], DOCUMENTS[2:4]]
    retrieved(RagKVStagedRetriever(stages=lambda _: stages, llm=llm), asynchronous)
    llm.invoke(TEXTS[2])
    assert [miss.chunk for miss in llm.last_report.misses] == [TEXTS[3][:80]]


def test_a_cancelled_retrieval_names_nothing(kv):
    llm, searching, go = ChatRagKV(kv=kv, max_tokens=2), threading.Event(), threading.Event()

    def stages(_):
        yield DOCUMENTS[:2]
        searching.set()
        assert go.wait(30)
        yield DOCUMENTS[2:4]

    async def leave():
        retriever = RagKVStagedRetriever(stages=stages, llm=llm)
        asking = asyncio.create_task(retriever.ainvoke(QUESTION))
        await asyncio.to_thread(searching.wait, 30)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        go.set()

    asyncio.run(leave())
    llm.invoke("Another question.")
    assert not llm.last_report.misses


def test_no_stage_at_all_and_a_copy(kv):
    llm = ChatRagKV(kv=kv)
    retriever = RagKVStagedRetriever(stages=lambda _: [], llm=llm)
    assert retrieved(retriever, False) == retrieved(retriever, True) == []
    by_engine = RagKVStagedRetriever(stages=lambda _: [DOCUMENTS[:2]], kv=kv)
    assert retrieved(by_engine, False) == DOCUMENTS[:2]
    assert len(kv.generate("So?", max_new_tokens=1).report.misses) == 2
    assert copy.deepcopy(retriever).llm is llm
    with pytest.raises(ValueError, match="either llm"):
        RagKVStagedRetriever(stages=lambda _: [], llm=None)
