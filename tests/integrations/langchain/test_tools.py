"""ChatRagKV calls tools and answers by schemas: in this process, and through a server."""

from __future__ import annotations

import json

import pytest
from langchain.agents import create_agent
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_ragkv import ChatRagKV, RagKVRetriever
from pydantic import BaseModel, Field
from tiny import some_chunks

from ragkv.errors import ConfigError

CHUNKS = some_chunks(3)
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "targets"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "search", "arg'


@tool
def search(query: str) -> str:
    """Search the manual."""
    return "\n\n".join(CHUNKS[:2]) if "targets" in query else "Nothing."


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


@pytest.fixture
def chat(make, kv):
    """Return a model, over an engine or a server of it, and that engine."""
    kv.precompute(CHUNKS)
    return make(ChatRagKV, max_tokens=100), kv


def joined(chunks) -> AIMessage:
    first, *rest = chunks
    return sum(rest, first)


@pytest.mark.parametrize("streaming", [False, True])
def test_invalid_calls_are_no_exceptions(chat, make_say, streaming):
    llm, kv = chat
    make_say(kv, BROKEN)
    bound = llm.bind_tools([search])
    answer = joined(bound.stream("Where?")) if streaming else bound.invoke("Where?")
    assert answer.tool_calls == []
    (call,) = answer.invalid_tool_calls
    assert '"search", "arg' in call["args"] or '\\"search\\", \\"arg' in call["args"]


def test_no_call_may_be_made(chat, make_say):
    llm, kv = chat
    make_say(kv, CALL)
    answer = llm.bind_tools([search], tool_choice="none").invoke("Where?")
    assert (answer.content, answer.tool_calls) == (CALL, [])


def test_a_tools_result_is_reused(chat, make_say):
    """Documents in a ToolMessage are chunks like any others, and turns go on."""
    llm, kv = chat
    bound = llm.bind_tools([search])
    make_say(kv, CALL)
    asked = HumanMessage("What is a target list?")
    first = bound.invoke([asked])
    result = search.invoke(first.tool_calls[0])
    assert isinstance(result, ToolMessage)
    make_say(kv, "A list of targets.")
    bound.invoke([asked, first, result])
    report = llm.last_report
    assert {use.text for use in report.chunks if use.reused} == set(CHUNKS[:2])


def test_an_agent_of_several_steps(chat, make_say):
    llm, kv = chat
    make_say(kv, CALL, CALL.replace("targets", "apples"), "It is a list.")
    agent = create_agent(llm, [search])
    state = agent.invoke({"messages": [("human", "What is a target list?")]})
    kinds = [type(message).__name__ for message in state["messages"]]
    assert kinds == [
        *("HumanMessage", "AIMessage", "ToolMessage", "AIMessage", "ToolMessage", "AIMessage")
    ]
    assert state["messages"][-1].content == "It is a list."
    steps = [
        message.response_metadata["ragkv"]
        for message in state["messages"]
        if isinstance(message, AIMessage)
    ]
    cached = [each["tokens"]["prompt"] - each["tokens"]["fresh"] for each in steps]
    assert cached == sorted(cached)
    assert steps[-1]["tokens"]["history_exact"] > steps[0]["tokens"]["prompt"]


# ---- structured output


def test_raw_answers(chat):
    llm, _ = chat
    chain = llm.with_structured_output(Person, include_raw=True)
    whole = chain.invoke("Who?", max_tokens=300)
    assert isinstance(whole["parsed"], Person)
    assert json.loads(whole["raw"].content) == whole["parsed"].model_dump()
    with pytest.raises(ConfigError, match="json_mode"):
        llm.with_structured_output(Person, method="guessing")


def test_a_stream_of_objects(chat):
    llm, _ = chat
    schema = {**Person.model_json_schema(), "title": "Person"}
    found = list(llm.with_structured_output(schema).stream("Who?", max_tokens=300))
    assert found[-1].keys() == {"name", "age"}
    assert len(found) > 2


def test_a_vector_store_is_not_a_retriever_yet(make_engine):
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    with pytest.raises(ValueError, match=r"\.as_retriever\(\)"):
        RagKVRetriever(retriever=store, llm=ChatRagKV(kv=make_engine()))
