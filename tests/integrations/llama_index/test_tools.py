"""RagKVLLM calls tools and predicts objects: in this process, and through a server."""

from __future__ import annotations

import pytest
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CustomQueryEngine, RouterQueryEngine
from llama_index.core.schema import TextNode
from llama_index.core.selectors import PydanticSingleSelector
from llama_index.core.tools import FunctionTool, QueryEngineTool, ToolMetadata
from llama_index.llms.ragkv import RagKVLLM
from pydantic import BaseModel, Field
from tiny import some_chunks

from ragkv.errors import ConfigError

CHUNKS = some_chunks(3)
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "targets"}}\n</tool_call>'


def search(query: str) -> str:
    """Search the manual."""
    return "\n\n".join(CHUNKS[:2]) if "targets" in query else "Nothing."


SEARCH = FunctionTool.from_defaults(search)


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)


class Told(CustomQueryEngine):
    """An engine with one answer."""

    answer: str

    def __init__(self, answer: str) -> None:
        super().__init__(answer=answer)

    def custom_query(self, query_str: str) -> str:
        return self.answer


@pytest.fixture
def made(make, kv):
    """Return a model, over an engine or a server of it, and that engine."""
    llm = make(RagKVLLM, max_new_tokens=400, context_window=4000, is_chat_model=True)
    for sink in ({}, llm.reuse_overrides):  # over a server, behind the default template's head
        kv.precompute(CHUNKS, **sink)
    assert llm.metadata.is_function_calling_model
    return llm, kv


async def test_a_stream_ends_with_the_calls(made, make_say):
    llm, kv = made
    make_say(kv, CALL, CALL)
    *_, last = llm.stream_chat_with_tools([SEARCH], user_msg="Where?")
    assert [call.tool_name for call in llm.get_tool_calls_from_response(last)] == ["search"]
    async for response in await llm.astream_chat_with_tools([SEARCH], user_msg="Where?"):
        last = response
    assert [call.tool_name for call in llm.get_tool_calls_from_response(last)] == ["search"]


def test_a_choice_that_is_given_stands_above_tool_required(made, make_say):
    llm, kv = made
    make_say(kv, "I know that.")
    given = {"tool_choice": "auto", "tool_required": True}
    response = llm.chat_with_tools([SEARCH], user_msg="Where?", **given)
    assert response.message.content == "I know that."


async def test_a_required_tool_stays_required(made):
    """LlamaIndex's own programs give ``tool_choice=None`` beside ``tool_required=True``."""
    llm, _ = made
    program = FunctionCallingProgram.from_defaults(Person, "Who is {name}?", llm=llm)
    assert isinstance(program(name="Tom"), Person)
    assert isinstance(await program.acall(name="Tom"), Person)


async def test_selectors_choose(made, make_say):
    llm, kv = made
    make_say(kv, '{"name": "SingleSelection", "arguments": {"index": 2, "reason": "It fits."}}')
    choices = [ToolMetadata("the first", name="a"), ToolMetadata("the second", name="b")]
    assert PydanticSingleSelector.from_defaults(llm=llm).select(choices, "Which?").ind == 1
    tools = [
        QueryEngineTool.from_defaults(Told(answer), description=answer)
        for answer in ("Not me.", "It is me.")
    ]
    router = RouterQueryEngine.from_defaults(tools, llm=llm)
    assert str(router.query("Which?")) == "It is me."
    assert str(await router.aquery("Which?")) == "It is me."


def test_no_call_and_broken_calls(made, make_say):
    llm, kv = made
    make_say(kv, "I know that.", '<tool_call>{"name": "search", "arg')
    response = llm.chat_with_tools([SEARCH], user_msg="Where?")
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="tool call"):
        llm.get_tool_calls_from_response(response)
    response = llm.chat_with_tools([SEARCH], user_msg="Where?")
    assert response.message.content == '{"name": "search", "arg'
    assert len(response.raw["invalid_tool_calls"]) == 1


def test_predict_and_call(made, make_say):
    llm, kv = made
    make_say(kv, CALL)
    answer = llm.predict_and_call([SEARCH], user_msg="What is a target?")
    assert answer.response == search("targets")


@pytest.mark.parametrize("parallel", [True, False])
async def test_predict_and_call_without_a_call(made, make_say, parallel):
    llm, kv = made
    given = {"allow_parallel_tool_calls": parallel, "error_on_no_tool_call": False}
    for text in ("I know that.", '{"name": "search", "arg'):
        make_say(kv, text)
        assert llm.predict_and_call([SEARCH], "Where?", **given).response == text
        answer = await llm.apredict_and_call([SEARCH], "Where?", **given)
        assert (answer.response, answer.sources) == (text, [])
        assert llm.last_report.decode.tokens > 0


async def test_a_function_agent(made, make_say):
    llm, kv = made
    make_say(kv, CALL, "It is a list.")
    agent = FunctionAgent(tools=[SEARCH], llm=llm, streaming=False)
    answer = await agent.run("What is a target list?")
    assert str(answer) == "It is a list."
    report = llm.last_report
    assert {use.text for use in report.chunks if use.reused} == set(CHUNKS[:2])
    assert [call.tool_name for call in answer.tool_calls] == ["search"]


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_agent_of_one_call_at_a_time(made, make_say, streaming):
    llm, kv = made
    make_say(kv, CALL + CALL, "It is a list.")
    agent = FunctionAgent(
        tools=[SEARCH], llm=llm, streaming=streaming, allow_parallel_tool_calls=False
    )
    answer = await agent.run("What is a target list?")
    assert str(answer) == "It is a list."
    assert len(answer.tool_calls) == 1


async def test_a_react_agent_with_a_query_tool(made, make_say):
    """It calls tools by text; what they return is reused where the chat quotes it."""
    llm, kv = made
    nodes = [TextNode(text=text) for text in CHUNKS]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))
    tool = QueryEngineTool.from_defaults(
        index.as_query_engine(llm=llm, similarity_top_k=2),
        name="search",
        description="Searches the manual.",
    )
    make_say(
        kv,
        'Thought: I need a tool.\nAction: search\nAction Input: {"input": "targets"}',
        "A list of targets.",
        "Thought: I can answer without using any more tools.\nAnswer: It is a list.",
    )
    agent = ReActAgent(tools=[tool], llm=llm, streaming=True)
    answer = await agent.run("What is a target list?")
    assert str(answer) == "It is a list."
    assert [call.tool_name for call in answer.tool_calls] == ["search"]
    assert llm.last_report.tokens.history_exact > 100


def test_tools_need_the_chat_template(make_engine):
    llm = RagKVLLM(kv=make_engine(), is_chat_model=True, messages_to_prompt=str)
    assert not llm.metadata.is_function_calling_model
    with pytest.raises(ConfigError, match="messages_to_prompt"):
        llm.chat_with_tools([SEARCH], user_msg="Where?")


# ---- objects


async def test_objects_of_a_class(made):
    llm, _ = made
    prompt = PromptTemplate("Who is {name}?")
    assert isinstance(llm.structured_predict(Person, prompt, name="Tom"), Person)
    assert isinstance(await llm.astructured_predict(Person, prompt, name="Tom"), Person)
    structured = llm.as_structured_llm(Person)
    assert isinstance(structured.chat([ChatMessage("Who?")]).raw, Person)
    assert isinstance((await structured.achat([ChatMessage("Who?")])).raw, Person)


@pytest.mark.parametrize(
    "given",
    [{"tool_choice": "required"}, {"tool_required": True}, {"allow_parallel_tool_calls": False}],
)
def test_what_is_asked_of_calls_changes_no_object(made, given):
    """LlamaIndex's programs and users of models that answer by a call give it."""
    llm, _ = made
    assert isinstance(llm.structured_predict(Person, PromptTemplate("Who?"), given), Person)
    *_, last = llm.stream_structured_predict(Person, PromptTemplate("Who?"), given)
    assert isinstance(last, Person)


async def test_a_stream_of_objects(made):
    llm, _ = made
    prompt = PromptTemplate("Who is {name}?")
    found = list(llm.stream_structured_predict(Person, prompt, name="Tom"))
    assert isinstance(found[-1], Person)
    assert len(found) > 2
    async for each in await llm.astream_structured_predict(Person, prompt, name="Tom"):
        last = each
    assert last == found[-1]
