"""Keywords of ChatRagKV's calls and settings of both models: taken, or refused by name."""

from __future__ import annotations

from functools import partial
from typing import Literal, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import AutoStrategy, ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.messages.tool import invalid_tool_call
from langchain_core.tools import tool
from langchain_ragkv import ChatRagKV, RagKVLLM
from langchain_ragkv.prompts import convert_messages
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ragkv.engine.engine import RagKV
from ragkv.errors import ConfigError, ModelNotFoundError, UnknownMethodError

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
FORCED = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@tool
def other() -> str:
    """Do something else."""
    return "done"


@wrap_model_call
async def one_call(request, handler):
    """Ask for one call at most, as an agent's model settings do."""
    return await handler(request.override(model_settings={"parallel_tool_calls": False}))


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=4)
    age: int = Field(ge=0, le=99)


class Place(TypedDict):
    """A place."""

    floor: int


@pytest.fixture
def chat(make, kv):
    """Return a model, over an engine or a server of it, and that engine."""
    return make(ChatRagKV, max_tokens=120), kv


def answered(bound, streaming) -> AIMessage:
    if not streaming:
        return bound.invoke("x")
    first, *rest = bound.stream("x")
    return sum(rest, first)


def test_an_answer_of_two_calls(chat, make_say):
    llm, kv = chat
    make_say(kv, CALL + CALL)
    answer = llm.bind_tools([add]).invoke("x")
    assert len({call["id"] for call in answer.tool_calls}) == 2
    assert answer.invalid_tool_calls == []
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    given = {"tools": [add], "parallel_tool_calls": False}
    assert len(llm.bind(**given).invoke("x").tool_calls) == 1


async def test_an_agent_that_calls_one_tool_at_a_time(chat, make_say):
    llm, kv = chat
    make_say(kv, CALL + CALL, "It is 3.")
    agent = create_agent(llm, [add], middleware=[one_call])
    state = await agent.ainvoke({"messages": [("human", "How much?")]})
    assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "ai"]


def test_allowed_tools_are_the_only_ones(make_engine):
    llm = ChatRagKV(kv=make_engine())
    for allowed in (
        {"mode": "auto", "tools": [{"type": "function", "name": "jump"}]},
        {"mode": "never", "tools": []},
    ):
        with pytest.raises(ConfigError, match="allowed_tools"):
            llm.bind_tools([add], tool_choice={"type": "allowed_tools", **allowed}).invoke("x")
    for choice in ("jump", 5):
        with pytest.raises(ConfigError, match="tool_choice"):
            llm.bind_tools([add], tool_choice=choice).invoke("x")


def test_strict_is_said_to_the_decoder_alone(make_engine, monkeypatch):
    """The prompt is the same, and so are the chunks that fit its head."""
    kv, seen = make_engine(), []
    stream = RagKV.stream
    monkeypatch.setattr(
        RagKV,
        "stream",
        lambda self, prompt, **given: seen.append(prompt) or stream(self, prompt, **given),
    )
    llm = ChatRagKV(kv=kv, max_tokens=2)
    for strict in (True, False, None):
        llm.bind_tools([add, other], strict=strict).invoke("x")
    assert [[each["function"].get("strict") for each in prompt.tools] for prompt in seen] == [
        [True, True],
        [False, False],
        [None, None],
    ]
    assert len({kv.generate(prompt, max_new_tokens=1).report.tokens.prompt for prompt in seen}) == 1


# ---- the form of answers


NAMED = {"name": "x", "schema": Person.model_json_schema()}


@pytest.mark.parametrize(
    ("form", "streaming"),
    [
        (Person, False),
        (Person, True),
        (Person.model_json_schema(), True),
        ({"type": "json_schema", "json_schema": NAMED}, False),
        ({"type": "json_schema", "json_schema": {**NAMED, "strict": True}}, True),
    ],
)
def test_a_response_format(chat, form, streaming):
    """The object of a class stands where ChatOpenAI puts it."""
    llm, _ = chat
    bind = partial(llm.bind_tools, []) if streaming else llm.bind
    answer = answered(bind(response_format=form), streaming)
    person = Person.model_validate_json(answer.content)
    assert answer.additional_kwargs == ({"parsed": person} if form is Person else {})


def test_other_response_formats(chat):
    llm, _ = chat
    assert llm.invoke("x", response_format=Place).content.startswith('{"floor": ')
    assert llm.invoke("x", response_format={"type": "json_object"}).content.startswith("{")
    assert llm.invoke("x", response_format={"type": "text"}, max_tokens=2).content


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"response_format": 5}, "response_format must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format needs"),
        ({"response_format": {"type": "yaml"}}, "yaml"),
        ({"response_format": Person, "json_schema": {"type": "object"}}, "omit one"),
    ],
)
def test_response_formats_that_are_none(make_engine, given, said):
    with pytest.raises(ConfigError, match=said):
        ChatRagKV(kv=make_engine()).invoke("x", **given)


@pytest.mark.parametrize("strategy", [ProviderStrategy, ToolStrategy, AutoStrategy, None])
def test_an_agents_response_format(chat, strategy):
    llm, _ = chat
    form = Person if strategy is None else strategy(Person)
    state = create_agent(llm, [], response_format=form).invoke({"messages": [("human", "Who?")]})
    assert isinstance(state["structured_response"], Person)


def test_an_agent_of_tools_and_a_response_format(chat, make_say):
    """A step is a call or an answer in that form."""
    llm, kv = chat
    make_say(kv, CALL, '{"name": "Tom", "age": 3}')
    agent = create_agent(llm, [add], response_format=ProviderStrategy(Person))
    state = agent.invoke({"messages": [("human", "How old?")]})
    assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "ai"]
    assert state["structured_response"] == Person(name="Tom", age=3)
    make_say(kv, FORCED)
    bound = llm.bind_tools([add], tool_choice="any", response_format=Person)
    assert [call["name"] for call in bound.invoke("x").tool_calls] == ["add"]


# ---- lengths, log-probabilities, None, and names


def test_max_completion_tokens(chat):
    llm, _ = chat
    answer = llm.invoke("x", max_completion_tokens=3)
    assert answer.usage_metadata["output_tokens"] == 3
    assert llm.bind(max_completion_tokens=2).invoke("x").usage_metadata["output_tokens"] == 2


@pytest.mark.parametrize("streaming", [False, True])
def test_log_probabilities(chat, streaming):
    llm = ChatRagKV(kv=chat[0].kv, max_completion_tokens=4)
    assert "logprobs" not in llm.invoke("x").response_metadata
    for bound in (
        llm.bind(logprobs=True, top_logprobs=2),
        ChatRagKV(kv=llm.kv, max_tokens=4, logprobs=True, top_logprobs=2),
    ):
        answer = answered(bound, streaming)
        found = answer.response_metadata["logprobs"]["content"]
        assert "".join(each["token"] for each in found).startswith(answer.content)
        assert len(found) == 4
        for each in found:
            assert each["top_logprobs"][0]["token"] == each["token"]
            assert len(each["top_logprobs"]) == 2
            assert each["logprob"] < 0
    (first, *_) = llm.invoke("x", logprobs=True).response_metadata["logprobs"]["content"]
    assert first["top_logprobs"] == []
    usual = ChatRagKV(kv=llm.kv, max_tokens=2, logprobs=True)
    (first, _) = usual.bind(top_logprobs=1).invoke("x").response_metadata["logprobs"]["content"]
    assert len(first["top_logprobs"]) == 1
    with pytest.raises(ConfigError, match="logprobs=True"):
        llm.invoke("x", top_logprobs=2)


def test_none_is_not_given(chat):
    llm, _ = chat
    names = (
        *("tools", "tool_choice", "parallel_tool_calls", "strict", "response_format", "stop"),
        *("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "temperature"),
        *("top_p", "top_k", "seed", "recompute_ratio", "method", "json_schema", "user"),
    )
    none = dict.fromkeys(names)
    assert llm.invoke("x", **none).content == llm.invoke("x").content
    assert llm.bind_tools([add], **dict.fromkeys(["tool_choice", "strict"])).invoke("x")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("recompute_ration", "recompute_ratio"),
        ("ratio", "recompute_ratio"),
        ("max_token", "max_tokens"),
        ("tool_choices", "tool_choice"),
        ("parallel_tools", "parallel_tool_calls"),
        ("response_formats", "response_format"),
        ("stop_sequence", "stop_sequences"),
    ],
)
def test_unknown_keywords_are_refused_with_the_nearest(make_engine, name, near):
    llm = ChatRagKV(kv=make_engine())
    for ask in (llm.bind, partial(llm.bind_tools, [add]), partial(llm.invoke, "x")):
        with pytest.raises(ConfigError, match=rf"keyword {name}: .*did you mean {near}\?"):
            ask(**{name: 1})


@pytest.mark.parametrize(
    ("name", "near"),
    [("recompute_ration", "recompute_ratio"), ("model", "model_id"), ("max_token", "max_tokens")],
)
def test_unknown_fields_are_refused_with_the_nearest(make_engine, name, near):
    with pytest.raises(ValidationError, match=rf"field {name}: .*did you mean {near}\?"):
        ChatRagKV(kv=make_engine(), **{name: 1})


class Level(BaseModel):
    """A level."""

    level: Literal[1, 2]


LEVEL = {"title": "Level", "description": "A level.", **Level.model_json_schema()}


@pytest.mark.parametrize("schema", [Level, LEVEL])
def test_structured_output_by_a_call_takes_settings(chat, schema):
    llm, _ = chat
    given = {"method": "function_calling", "temperature": 0.5, "seed": 1, "strict": True}
    found = llm.with_structured_output(schema, **given).invoke("x")
    assert found in (Level(level=1), Level(level=2), {"level": 1}, {"level": 2})


def test_structured_output_by_a_call_holds_strictly(chat):
    """``strict`` refuses what cannot be enforced, as json_schema does."""
    llm, _ = chat
    schema = {**LEVEL, "properties": {"level": {"not": {"const": 3}}}}
    with pytest.raises(ConfigError, match="not"):
        llm.with_structured_output(schema, method="function_calling", strict=True).invoke("x")
    with pytest.raises(ConfigError, match="omit tools"):
        llm.with_structured_output(Level, method="function_calling", tools=[add])


@pytest.mark.parametrize("name", ["add", None])
def test_a_call_that_was_cut_off_is_there_before_its_result(chat, make_say, name):
    """As agents go on after one: LangChain's answer it by a tool message."""
    llm, kv = chat
    begun = invalid_tool_call(name=name, args='{"a": 1', id="abc123def", error="cut off")
    history = [
        HumanMessage("How much?"),
        AIMessage("", invalid_tool_calls=[begun]),
        ToolMessage("arguments were truncated", tool_call_id="abc123def"),
    ]
    _, asked, answered = convert_messages(history)
    (call,) = asked["tool_calls"]
    assert call["id"] == answered["tool_call_id"]
    assert call["function"] == {"name": name or "unknown", "arguments": {}}
    assert "tool_calls" not in convert_messages(history[:2])[1]
    make_say(kv, "It is 3.")
    assert llm.bind_tools([add]).invoke(history).content == "It is 3."


MAKERS = {
    "fields": lambda name, **given: ChatRagKV(model_id=name, **given),
    "from_model_id": ChatRagKV.from_model_id,
    "sampling": lambda name, **given: ChatRagKV.from_model_id(name, do_sample=True, **given),
    "llm": lambda name, **given: RagKVLLM.from_model_id(name, task="text-generation", **given),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"recompute_ratio": 7}, "recompute_ratio"),
        ({"method": "best"}, "no method 'best'"),
        ({"namespace": 5}, "namespace"),
    ],
)
def test_wrong_settings_are_refused_before_the_model_is_looked_for(maker, settings, said):
    with pytest.raises((ConfigError, UnknownMethodError, ValueError), match=said):
        MAKERS[maker]("no/such-model", **settings)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_missing_folder_is_said_to_be_missing(maker, tmp_path):
    with pytest.raises(ModelNotFoundError, match=f"There is no folder {tmp_path}/tiny"):
        MAKERS[maker](f"{tmp_path}/tiny")


def test_a_chat_model_takes_transformers_settings(folder):
    answers = []
    for given in (
        {},
        {"repetition_penalty": 1.0, "num_beams": 1, "length_penalty": 1.0},
        {"suppress_tokens": list(range(100, 400))},
    ):
        keywords = {"max_new_tokens": 12, **given}
        model = ChatRagKV.from_model_id(folder, store=":memory:", pipeline_kwargs=keywords)
        answers.append(model.invoke("What is a target, and what is none?").content)
        model.kv.close()
    plain, neutral, suppressed = answers
    assert plain == neutral != suppressed
    with pytest.raises(ConfigError, match="guidance_scale"):
        ChatRagKV.from_model_id(folder, pipeline_kwargs={"guidance_scale": 1.5})
