"""Chunks that were encoded once, behind one sink, serve every engine of LlamaIndex."""

import asyncio

import pytest
from listening import listening
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import HierarchicalNodeParser, get_leaf_nodes
from llama_index.core.query_engine import CitationQueryEngine, RetrieverQueryEngine
from llama_index.core.retrievers import AutoMergingRetriever
from llama_index.core.schema import Document, MetadataMode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.openai_like import OpenAILike
from llama_index.llms.ragkv import RagKVLLM, RagKVRetriever, RagKVTransform
from tiny import some_chunks

from ragkv import ReuseConfig

QUESTION = "What is a target list?"


@pytest.fixture
def llm(make_engine):
    kv = make_engine(reuse=ReuseConfig(history=False, on_miss="skip"))
    return RagKVLLM(kv=kv, is_chat_model=True, max_new_tokens=4, sink_from="default")


@pytest.fixture(params=["shown", "hidden"])
def index(llm, request):
    """Three nodes, encoded once without the metadata, which engines may show the model."""
    hidden = [] if request.param == "shown" else ["page"]
    nodes = [
        TextNode(text=text, metadata={"page": 7}, excluded_llm_metadata_keys=hidden)
        for text in some_chunks(3, 60)
    ]
    return VectorStoreIndex(RagKVTransform(llm=llm, metadata_mode=MetadataMode.NONE)(nodes))


def retriever(index, llm):
    inner = index.as_retriever(similarity_top_k=3)
    return RagKVRetriever(inner, llm, metadata_mode=MetadataMode.NONE)


def compact(index, llm):
    engine = RetrieverQueryEngine.from_args(retriever(index, llm), llm=llm)
    engine.query(QUESTION)


def tree_summarize(index, llm):
    given = {"llm": llm, "response_mode": "tree_summarize"}
    RetrieverQueryEngine.from_args(retriever(index, llm), **given).query(QUESTION)


def context_chat(index, llm):
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    ContextChatEngine.from_defaults(retriever(index, llm), llm=llm, memory=memory).chat(QUESTION)


def condensing_chat(index, llm):
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    kind = CondensePlusContextChatEngine
    kind.from_defaults(retriever(index, llm), llm=llm, memory=memory).chat(QUESTION)


def citation(index, llm):
    given = {"llm": llm, "retriever": retriever(index, llm), "citation_chunk_size": 2000}
    CitationQueryEngine.from_args(index, **given).query(QUESTION)


ENGINES = (compact, tree_summarize, context_chat, condensing_chat, citation)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.__name__)
def test_an_engine_reuses_the_corpus(index, llm, engine):
    engine(index, llm)
    report = llm.last_report
    assert sorted(use.text for use in report.chunks) == sorted(some_chunks(3, 60))
    assert not report.misses
    assert report.tokens.reused > report.tokens.fresh / 2


def test_an_agent_reuses_the_corpus(index, llm, reports, make_say):
    engine = RetrieverQueryEngine.from_args(retriever(index, llm), llm=llm)
    tool = QueryEngineTool.from_defaults(engine, name="search", description="Searches.")
    call = '<tool_call>{"name": "search", "arguments": {"input": "list"}}</tool_call>'
    make_say(llm.kv, call, "It is a list.", "Yes.")
    llm.max_new_tokens = 60

    async def run():
        return await FunctionAgent(tools=[tool], llm=llm, streaming=False).run(QUESTION)

    assert str(asyncio.run(run())) == "Yes."
    assert [len(report.chunks) for report in reports] == [0, 3, 0]
    assert not [miss for report in reports for miss in report.misses]


def test_a_parent_takes_its_leaves(llm):
    parser = HierarchicalNodeParser.from_defaults([240, 60], chunk_overlap=0)
    document = Document(text=" ".join(some_chunks(6, 60)), metadata={"page": 7})
    nodes = parser.get_nodes_from_documents([document])
    step = RagKVTransform(llm=llm, metadata_mode=MetadataMode.NONE)
    leaves = step(get_leaf_nodes(nodes))
    docstore = SimpleDocumentStore()
    docstore.add_documents(nodes)
    storage = StorageContext.from_defaults(docstore=docstore)
    inner = VectorStoreIndex(leaves, storage_context=storage).as_retriever(similarity_top_k=6)
    naming = RagKVRetriever(inner, llm, metadata_mode=MetadataMode.NONE)
    merging = AutoMergingRetriever(naming, storage, simple_ratio_thresh=0.1)
    assert {each.node_id for each in merging.retrieve(QUESTION)} - {each.id_ for each in leaves}
    RetrieverQueryEngine.from_args(merging, llm=llm).query(QUESTION)
    report = llm.last_report
    assert len(report.chunks) > 6
    assert not report.misses
    assert report.tokens.reused > 4 * report.tokens.fresh


@pytest.mark.parametrize("served_sink", ["auto", "default"])
def test_another_client_s_prompts_reuse_the_corpus(make_engine, reports, index, llm, served_sink):
    if served_sink == "auto":
        step = RagKVTransform(llm=RagKVLLM(kv=llm.kv), metadata_mode=MetadataMode.NONE)
        step(list(index.docstore.docs.values()))
    else:
        llm.kv.reuse = llm.kv.reuse.override(sink=llm.sink)
    with listening(llm.kv) as url:
        where = {"api_base": f"{url}/v1", "api_key": "none", "is_chat_model": True}
        other = OpenAILike("default", context_window=4000, max_tokens=4, **where)
        index.as_query_engine(llm=other, similarity_top_k=3).query(QUESTION)
    assert len(reports[-1].chunks) == 3
    assert not reports[-1].misses
