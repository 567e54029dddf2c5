"""Tools in both frameworks: calls, loops of agents, histories of other models."""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ragkv import ChatRagKV
from langchain_ragkv.prompts import convert_messages
from listening import listening
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ToolCallBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.ragkv import RagKVLLM
from llama_index.llms.ragkv.prompts import as_dicts
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from templates import KINDS, tokenizer_of
from tiny import tiny_model

from ragkv import Chat, RagKV
from ragkv.client import RemoteRagKV
from ragkv.errors import ConfigError
from ragkv.prompt.render import render
from ragkv.prompt.tools.reader import format_of

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
FORCED = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
ADDED = ("add", {"a": 1, "b": 2})


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def count(down: bool) -> str:
    """Count up or down."""
    return f"{down}"


@pytest.fixture(params=[False, True])
def streaming(request) -> bool:
    return request.param


@pytest.mark.parametrize(("parallel", "times"), [({}, 2), (True, 2), (False, 1)])
def test_one_call_at_most(framework, model, kv, make_say, parallel, times, streaming):
    given = {} if parallel == {} else {"parallel_tool_calls": parallel}
    make_say(kv, f"Look:\n{CALL}{CALL}")
    answer = framework.calls(model(120), [add], streaming=streaming, **given)
    assert answer == ("Look:", [ADDED] * times)


@pytest.mark.parametrize("choice", ["required", "count"])
def test_a_call_that_has_to_be_made(framework, model, choice, streaming):
    text, calls = framework.calls(model(400), [count], streaming=streaming, tool_choice=choice)
    assert (text, calls) in [("", [("count", {"down": down})]) for down in (True, False)]


CHOICES = [
    *("any", "required", True, "add", {"type": "tool", "name": "add"}, {"type": "any"}),
    {"type": "function", "function": {"name": "add"}},
    {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "add"}}],
        },
    },
]


@pytest.mark.parametrize("place", ["here"], indirect=True)  # a server's: tests/serve/test_tools.py
@pytest.mark.parametrize("choice", CHOICES)
def test_choices_of_a_call(framework, model, kv, make_say, choice):
    make_say(kv, FORCED)
    asked = {"streaming": False, "tool_choice": choice}
    assert framework.calls(model(120), [add, count], **asked) == ("", [ADDED])


@pytest.mark.parametrize("place", ["here"], indirect=True)
@pytest.mark.parametrize("choice", [None, False, "auto", "none", {"type": "auto"}])
def test_choices_that_leave_it_to_the_model(framework, model, kv, make_say, choice):
    make_say(kv, "It is 3.")
    asked = {"streaming": False, "tool_choice": choice}
    assert framework.calls(model(120), [add], **asked) == ("It is 3.", [])


CALLS = {
    "hermes": '<tool_call>{{"name": "look", "arguments": {{"city": "{}"}}}}</tool_call>',
    "mistral": '[TOOL_CALLS] [{{"name": "look", "arguments": {{"city": "{}"}}}}]',
    "llama3": '<|python_tag|>{{"name": "look", "parameters": {{"city": "{}"}}}}',
    "gemma": "<start_function_call>call:look{{city:<escape>{}<escape>}}<end_function_call>",
    "gpt_oss": '<|channel|>commentary to=functions.look<|message|>{{"city": "{}"}}<|call|>',
}
SEVERAL = ("hermes", "gemma", "gpt_oss")
"""Formats in which one call can stand behind another as it is."""
FINAL = "Both are far."
ASKED = "How far are they?"


def look(city: str) -> str:
    """Look up a city."""
    return f"{city} is 700 km away."


TOOL = FunctionTool.from_defaults(look)
DEFINITION = TOOL.metadata.to_openai_tool()


DOORS = (
    *("core", "client", "openai", "langchain here", "langchain served"),
    *("llama_index here", "llama_index served"),
)
OTHERS = ("qwen3", "gemma3", "parts", "first_system", "mistral_small", "lfm2")
"""Kinds that differ in nothing that tools need; ``tests/prompt`` has them."""


def doors_of_kinds() -> list[tuple[str, str]]:
    """Each kind through the core and two of the other doors, in turn."""
    others = itertools.cycle(DOORS[1:])
    return [
        (kind, door)
        for kind in sorted(KINDS.keys() - OTHERS)
        for door in ("core", *itertools.islice(others, 2))
    ]


@pytest.fixture
def engine(request) -> Iterator[RagKV]:
    with RagKV(tiny_model(layers=2), tokenizer_of(request.param), store=":memory:") as kv:
        yield kv


@pytest.fixture
def say(engine, make_say) -> Callable[[], None]:
    """Have the model call one city after the other, or both at once where its form has that."""

    def begin() -> None:
        form = format_of(engine.tokenizer).name
        first, second = (CALLS[form].format(city) for city in ("Oslo", "Rome"))
        answers = [first, second, FINAL]
        if form in SEVERAL:
            answers = [first + second, first, FINAL]
        make_say(engine, *answers)

    return begin


def by_core(kv: RagKV | RemoteRagKV, texts: list[str]) -> str:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": ASKED}]}
    ]
    while True:
        answer = kv.generate(Chat(messages, [DEFINITION]), max_new_tokens=300)
        if not answer.tool_calls:
            assert answer.report.tokens.history_exact or answer.report.tokens.history_repaired
            return answer.text
        made = [
            {"id": call.id, "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in answer.tool_calls
        ]
        messages += [{"role": "assistant", "content": answer.text, "tool_calls": made}]
        for call in answer.tool_calls:
            texts.append(look(**call.arguments))
            messages.append({"role": "tool", "content": texts[-1], "tool_call_id": call.id})


def by_openai(url: str, texts: list[str]) -> str:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    while True:
        answer = client.chat.completions.create(
            model="default", messages=messages, tools=[DEFINITION], max_tokens=300
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            assert answer.usage.prompt_tokens_details.cached_tokens
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            texts.append(look(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "content": texts[-1], "tool_call_id": call.id})


def by_langchain(llm: ChatRagKV, texts: list[str]) -> str:
    state = create_agent(llm, [tool(look)]).invoke({"messages": [("human", ASKED)]})
    texts += [each.content for each in state["messages"] if isinstance(each, ToolMessage)]
    return state["messages"][-1].content


async def by_llama_index(llm: RagKVLLM, texts: list[str], **given: Any) -> str:
    agent = FunctionAgent(tools=[TOOL], llm=llm, **given)
    answer = await agent.run(ASKED)
    texts += [str(call.tool_output.content) for call in answer.tool_calls]
    return str(answer)


def by_door(engine: RagKV, url: str, door: str, texts: list[str]) -> str:
    if door == "openai":
        return by_openai(url, texts)
    if door == "core":
        return by_core(engine, texts)
    served = door.endswith("served")
    if door.startswith("langchain"):
        given = {"base_url": url} if served else {"kv": engine}
        llm = ChatRagKV(**given, max_tokens=300)
        answer = by_langchain(llm, texts)
    elif door.startswith("llama_index"):
        given = {"api_base": url} if served else {"kv": engine}
        llm = RagKVLLM(**given, is_chat_model=True, max_new_tokens=300, context_window=4000)
        system = "Use your tools." if served else None
        answer = asyncio.run(by_llama_index(llm, texts, streaming=served, system_prompt=system))
    else:
        with RemoteRagKV(url) as kv:
            return by_core(kv, texts)
    if served:
        llm.kv.close()
    return answer.strip()


@pytest.mark.parametrize(("engine", "door"), doors_of_kinds(), indirect=["engine"])
def test_every_tool_is_called(engine, say, door):
    texts: list[str] = []
    with listening(engine) as url:
        say()  # warming up draws an answer, too
        assert by_door(engine, url, door, texts) == FINAL
    assert {each.partition(" ")[0] for each in texts} == {"Oslo", "Rome"}


@pytest.mark.parametrize("engine", sorted(KINDS.keys() - OTHERS), indirect=True)
async def test_tools_that_are_given_no_longer(engine, say):
    llm = ChatRagKV(kv=engine, max_tokens=300)
    say()
    called = llm.bind_tools([look]).invoke(ASKED)
    results = [ToolMessage("Far.", tool_call_id=each["id"]) for each in called.tool_calls]
    assert llm.invoke([HumanMessage(ASKED), called, *results]).response_metadata
    other = RagKVLLM(kv=engine, is_chat_model=True, max_new_tokens=300)
    asked = [ChatMessage(ASKED)]
    say()
    response = await other.achat_with_tools([TOOL], chat_history=asked)
    results = [
        ChatMessage("Far.", role="tool", additional_kwargs={"tool_call_id": call.tool_id})
        for call in other.get_tool_calls_from_response(response)
    ]
    assert (await other.achat([*asked, response.message, *results])).raw


# ---- history of other models


@pytest.mark.parametrize(
    "kind",
    sorted(
        {"thinking", "reasoning", "tool_call", "function_call", "tool_use", "invalid_tool_call"}
    ),
)
def test_langchains_blocks_of_other_models(kind):
    block = {"type": kind, kind: "...", "id": "toolu_01", "name": "look", "input": {}, "args": {}}
    call = {"name": "look", "args": {"city": "Oslo"}, "id": "toolu_01"}
    said = AIMessage([block, {"type": "text", "text": "I look."}], tool_calls=[call])
    result = ToolMessage([{"type": "text", "text": "Far."}], tool_call_id="toolu_01")
    messages = convert_messages([HumanMessage(ASKED), said, result])
    assert messages[1]["content"] == "I look."
    text = render(messages, tokenizer_of("mistral")).text
    assert "Oslo" in text
    assert "Far." in text


def test_llama_indexs_messages_of_other_models():
    function = {"name": "look", "arguments": '{"city": "Oslo"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    given = [call, ChatCompletionMessageFunctionToolCall.model_validate({**call, "id": "call_2"})]
    block = ToolCallBlock(
        tool_call_id="call_3", tool_name="look", tool_kwargs=function["arguments"]
    )
    history = [
        ChatMessage("Be brief.", role="developer"),
        ChatMessage(ASKED),
        ChatMessage("", role="chatbot", additional_kwargs={"tool_calls": given}),
        ChatMessage("Far.", role="function", additional_kwargs={"name": "look"}),
        ChatMessage("Far.", role="tool", additional_kwargs={"tool_call_id": "call_2"}),
        ChatMessage(role="model", blocks=[TextBlock(text="I look."), block]),
        ChatMessage("Far.", role="tool", additional_kwargs={"tool_call_id": "call_3"}),
    ]
    chat = Chat(as_dicts(history))
    assert [each["role"] for each in chat] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "tool")
    ]
    results = [each for each in chat if each["role"] == "tool"]
    assert [(each["name"], each["tool_call_id"]) for each in results] == [
        *(("look", "call_1"), ("look", "call_2"), ("look", "call_3"))
    ]
    for kind in ("functiongemma", "mistral", "gpt_oss", "gemma2"):
        assert render(chat, tokenizer_of(kind)).text.count("Oslo") == 3
    block.tool_kwargs = '"Oslo"'
    with pytest.raises(ConfigError, match=r"messages\[5\].*'look'.*JSON object"):
        Chat(as_dicts(history))
