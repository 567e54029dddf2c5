"""JSON and tool calls that end at the longest length: both frameworks say so, here and served."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.exceptions import OutputParserException
from langchain_core.tools import tool
from langchain_ragkv import ChatRagKV
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.core.types import PydanticProgramMode
from llama_index.llms.ragkv import RagKVLLM
from pydantic import BaseModel, ValidationError

from ragkv import Chat
from ragkv.errors import CutOffError

MODES = (PydanticProgramMode.DEFAULT, PydanticProgramMode.FUNCTION, PydanticProgramMode.LLM)
LENGTHS = (1, 12, 60)
"""Tokens: nothing of a call, a part of its name, a part of its arguments."""
CUT = "cut off at max_new_tokens"
ASKED = [{"role": "user", "content": "Which?"}]
ASK = PromptTemplate("Which?")
OBJECT = f'{{"dish": "{"a very long list of dishes " * 9}'
FORCED = f'{{"name": "order", "arguments": {OBJECT}'
WHOLE = '{"dish": "soup", "places": ["here"]}'
BEGUN = f"<tool_call>{FORCED}"


class Order(BaseModel):
    """An order."""

    dish: str
    places: list[str]


def order(dish: str, places: list[str]) -> str:
    """Order a dish."""
    return f"{dish}{places}"


@pytest.fixture(autouse=True)
def _said(kv, make_say):
    """Let the model begin an object."""
    make_say(kv, OBJECT)


@pytest.fixture
def chat(make):
    return lambda length: make(ChatRagKV, max_tokens=length)


@pytest.fixture
def llm(make):
    def make_llm(length: int, **given: Any) -> RagKVLLM:
        settings = {"is_chat_model": True, "context_window": 4000, **given}
        return make(RagKVLLM, max_new_tokens=length, **settings)

    return make_llm


# ---- the engine and its client


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_report_warns_of_it(make, kv, make_say, length, streaming, caplog, monkeypatch):
    make_say(kv, FORCED, OBJECT)
    monkeypatch.setattr("ragkv.answer.text._logged", [])
    engine = make(ChatRagKV).kv
    tools = [FunctionTool.from_defaults(order).metadata.to_openai_tool()]
    for prompt, given in (
        (Chat(ASKED, tools, "any"), {}),
        (ASKED, {"json_schema": Order.model_json_schema()}),
    ):
        if streaming:
            with engine.stream(prompt, max_new_tokens=length, **given) as stream:
                list(stream)
            answer = stream.completion
        else:
            answer = engine.generate(prompt, max_new_tokens=length, **given)
        assert answer.finish_reason == "length"
        assert CUT in " ".join(answer.report.warnings)
        assert all(CUT in call.error for call in answer.invalid_tool_calls)
        assert answer.text or answer.invalid_tool_calls
    assert caplog.text.count(CUT) == 1


def test_other_answers_are_not_cut_off(make):
    engine = make(ChatRagKV).kv
    schema = {"enum": [True]}
    for prompt, given in (
        (ASKED, {"max_new_tokens": 3, "ignore_eos": True}),
        (ASKED, {"json_schema": schema, "max_new_tokens": 300}),
    ):
        assert CUT not in " ".join(engine.generate(prompt, **given).report.warnings)
    whole = engine.generate(ASKED, json_schema=schema, max_new_tokens=300)
    most = max(1, len(whole.text))
    for length in range(1, most + 1):  # the last one is whole, without an end token
        answer = engine.generate(ASKED, json_schema=schema, max_new_tokens=length)
        assert (CUT in " ".join(answer.report.warnings)) == (answer.text != "true")


# ---- LangChain


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("schema", [Order, Order.model_json_schema()])
def test_langchains_structured_output(chat, kv, make_say, method, schema, length):
    if method == "function_calling":
        make_say(kv, FORCED.replace("order", "Order"))
    model = chat(length)
    chain = model.with_structured_output(schema, method=method)
    ways = (
        lambda: chain.invoke("x"),
        lambda: list(chain.stream("x")),
        lambda: asyncio.run(chain.ainvoke("x")),
    )
    for way in ways:
        with pytest.raises(OutputParserException, match=CUT):
            way()
    raw = model.with_structured_output(schema, method=method, include_raw=True).invoke("x")
    assert CUT in str(raw["parsing_error"])
    assert raw["raw"].response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("choice", ["any", "order", "auto"])
def test_langchains_tools(chat, kv, make_say, length, choice):
    make_say(kv, BEGUN if choice == "auto" else FORCED)
    bound = chat(length).bind_tools([tool(order)], tool_choice=choice)
    first, *rest = bound.stream("x")
    streamed = sum(rest, first)
    for message in (bound.invoke("x"), asyncio.run(bound.ainvoke("x")), streamed):
        assert not message.tool_calls
        assert message.response_metadata["finish_reason"] == "length"
        if choice != "auto" or length > 12:
            assert CUT in " ".join(message.response_metadata["ragkv"]["warnings"])
            assert message.invalid_tool_calls or message.content
        if choice != "auto":
            (call,) = message.invalid_tool_calls
            assert call["args"]
            assert call["name"] == ("order" if length > 12 else None)
        if message is not streamed:  # LangChain drops the errors of a stream's calls
            assert all(CUT in call["error"] for call in message.invalid_tool_calls)


@pytest.mark.parametrize("length", LENGTHS)
def test_langchains_response_format(chat, length):
    message = chat(length).bind(response_format=Order).invoke("x")
    assert "parsed" not in message.additional_kwargs
    assert message.response_metadata["finish_reason"] == "length"
    assert CUT in " ".join(message.response_metadata["ragkv"]["warnings"])


def test_langchains_agents(chat, kv, make_say):
    make_say(kv, BEGUN)
    agent = create_agent(chat(60), [tool(order)])
    *_, last = agent.invoke({"messages": [("user", "x")]})["messages"]
    assert CUT in last.invalid_tool_calls[0]["error"]
    assert CUT in " ".join(last.response_metadata["ragkv"]["warnings"])


@pytest.mark.parametrize("length", LENGTHS)
def test_langchains_agents_with_structured_output(chat, kv, make_say, length):
    """Without tools such an agent asks until it has its object."""
    make_say(kv, FORCED.replace("order", "Order"))
    agent = create_agent(chat(length), [], response_format=Order)
    with pytest.raises(CutOffError, match=CUT):
        agent.invoke({"messages": [("user", "x")]})
    agent = create_agent(chat(length), [tool(order)], response_format=Order)
    *_, last = agent.invoke({"messages": [("user", "x")]})["messages"]
    assert CUT in last.invalid_tool_calls[0]["error"]


# ---- LlamaIndex


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mode", MODES)
def test_llama_indexs_structured_prediction(llm, kv, make_say, length, mode):
    if mode == PydanticProgramMode.FUNCTION:
        make_say(kv, FORCED.replace("order", "Order"))
    model = llm(length, pydantic_program_mode=mode)
    structured = model.as_structured_llm(Order)
    ways = [
        lambda: model.structured_predict(Order, ASK),
        lambda: asyncio.run(model.astructured_predict(Order, ASK)),
        lambda: structured.complete("x"),
        lambda: asyncio.run(structured.acomplete("x")),
        lambda: list(model.stream_structured_predict(Order, ASK)),
        lambda: asyncio.run(_all(model)),
    ]
    for way in ways:
        with pytest.raises(CutOffError, match=CUT):
            way()


@pytest.mark.parametrize("is_chat_model", [True, False])
@pytest.mark.parametrize("text", [WHOLE, f"{WHOLE} and more {'words ' * 30}"])
def test_a_whole_object_in_llama_indexs_text_is_not_cut_off(llm, kv, make_say, text, is_chat_model):
    make_say(kv, text)
    mode = PydanticProgramMode.LLM
    model = llm(40, pydantic_program_mode=mode, is_chat_model=is_chat_model)
    made = Order(dish="soup", places=["here"])
    assert model.structured_predict(Order, ASK) == made
    assert model.last_report.decode.tokens > 0
    assert list(model.stream_structured_predict(Order, ASK))[-1] == made
    assert asyncio.run(_all(model))[-1] == made
    make_say(kv, text.replace("dish", "meal"))
    with pytest.raises(ValidationError):
        model.structured_predict(Order, ASK)


async def _all(model: RagKVLLM) -> list[Any]:
    return [each async for each in await model.astream_structured_predict(Order, ASK)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("required", [True, False])
def test_llama_indexs_tools(llm, kv, make_say, length, required):
    make_say(kv, FORCED if required else BEGUN)
    model, tools = llm(length), [FunctionTool.from_defaults(order)]
    *_, streamed = model.stream_chat_with_tools(tools, "x", tool_required=required)
    whole = model.chat_with_tools(tools, "x", tool_required=required)
    for response in (whole, streamed):
        assert response.raw["finish_reason"] == "length"
        assert response.additional_kwargs["finish_reason"] == "length"
        with pytest.raises(CutOffError, match=CUT):
            model.get_tool_calls_from_response(response)
        assert model.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(CutOffError, match=CUT):
        model.predict_and_call(tools, "x", tool_required=required)
    with pytest.raises(CutOffError, match=CUT):
        asyncio.run(model.apredict_and_call(tools, "x", tool_required=required))


def test_llama_indexs_agents(llm, kv, make_say):
    make_say(kv, BEGUN)
    agent = FunctionAgent(llm=llm(60), tools=[FunctionTool.from_defaults(order)])

    async def run() -> Any:
        return await agent.run("x")

    output = asyncio.run(run())
    assert output.raw["finish_reason"] == "length"
    assert CUT in " ".join(output.raw["report"]["warnings"])


@pytest.mark.parametrize("made", ["stop", "length"])
def test_llama_indexs_answers_say_how_they_ended(llm, kv, make_say, made):
    make_say(kv, "It is." if made == "stop" else "It is. " * 40)
    for response in (llm(20).complete("x"), *list(llm(20).stream_complete("x"))[-1:]):
        assert response.raw["finish_reason"] == made
        assert response.additional_kwargs["finish_reason"] == made
