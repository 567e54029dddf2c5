"""RagKVStagedRetriever: what each stage found is loading while the next one is searched."""

import asyncio

import pytest
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.ragkv import RagKVLLM, RagKVPromptHelper, RagKVStagedRetriever
from tiny import some_chunks

NODES = [TextNode(text=text, metadata={"page": i}) for i, text in enumerate(some_chunks(8))]
QUESTION = "What is a target list?"


@pytest.fixture
def llm(make):
    return make(RagKVLLM, max_new_tokens=2, context_window=4000)


def retrieved(retriever, asynchronous):
    return (
        asyncio.run(retriever.aretrieve(QUESTION)) if asynchronous else retriever.retrieve(QUESTION)
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_query_engine_over_stages(asynchronous, llm, kv):
    def search(_):
        yield [(node, 0.5) for node in NODES[:2]]
        yield [(node, 0.7) for node in NODES[1:4]]

    helper = RagKVPromptHelper.from_llm(llm)
    synthesizer = get_response_synthesizer(llm=llm, prompt_helper=helper)
    engine = RetrieverQueryEngine(RagKVStagedRetriever(search, llm), synthesizer)
    for _ in range(2):
        answer = asyncio.run(engine.aquery(QUESTION)) if asynchronous else engine.query(QUESTION)
        assert [each.node for each in answer.source_nodes] == NODES[1:4]
        assert [each.score for each in answer.source_nodes] == [0.7] * 3
        kv.wait()
    assert len(llm.last_report.chunks) == 3
    assert not llm.last_report.misses


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_next_answer_accounts_for_the_last_stage_alone(asynchronous, llm, kv):
    found = [NodeWithScore(node=node, score=1.0) for node in NODES[1:3]]

    def stages(query):
        assert query == QUESTION
        yield [(NODES[0], 0.5)]
        kv.wait()
        assert len(kv._named.missing) == 1
        yield found

    assert retrieved(RagKVStagedRetriever(stages, llm), asynchronous) == found
    kv.wait()
    assert len(kv._named.missing) == 3
    llm.complete("Another question.")
    assert [miss.reason for miss in llm.last_report.misses] == ["left_out"] * 2
