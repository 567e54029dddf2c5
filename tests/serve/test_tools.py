"""Tools and response formats in OpenAI's form, by its own package."""

from __future__ import annotations

import json

import pytest
from openai import BadRequestError, OpenAI
from served import CHAT, chat, refused
from tiny import some_chunks

CHUNKS = some_chunks(2)
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {
            "type": "object",
            "properties": {"page": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["page"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>{"name": "search", "arguments": {"page": 5}}</tool_call>'
ASKED = [{"role": "user", "content": "Where?"}]
SCHEMA = SEARCH["function"]["parameters"]


@pytest.fixture
def client_and_engine(listen, make_engine):
    kv = make_engine()
    server = listen(kv)
    return OpenAI(base_url=f"{server.url}/v1", api_key="none"), kv


def ask_for(client, **given):
    return client.chat.completions.create(
        model="default", **{"messages": ASKED, "max_tokens": 100, **given}
    )


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "search"}}]
)
def test_a_call_that_has_to_be_made(client_and_engine, choice):
    client, _ = client_and_engine
    answer = ask_for(client, tools=[SEARCH], tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert (call.type, call.function.name, answer.message.content) == ("function", "search", None)
    assert 1 <= json.loads(call.function.arguments)["page"] <= 9


def test_a_call_and_its_result(client_and_engine, make_say):
    client, kv = client_and_engine
    make_say(kv, f"Look: {CALL}", "On page 5.")
    first = ask_for(client, tools=[SEARCH]).choices[0].message
    assert first.content == "Look:"
    (call,) = first.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "\n\n".join(CHUNKS)}
    messages = [*ASKED, first.model_dump(), result]
    answer = ask_for(client, tools=[SEARCH], messages=messages).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("On page 5.", "stop")


def test_a_stream_ends_with_the_calls(client_and_engine, make_say):
    client, kv = client_and_engine
    make_say(kv, CALL)
    chunks = [each.choices[0] for each in ask_for(client, tools=[SEARCH], stream=True)]
    calls = [call for each in chunks for call in each.delta.tool_calls or ()]
    assert [(call.index, call.function.name) for call in calls] == [(0, "search")]
    assert json.loads(calls[0].function.arguments) == {"page": 5}
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(each.delta.content for each in chunks)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_response_format(client_and_engine, streaming):
    client, _ = client_and_engine
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    answer = ask_for(client, response_format=form, stream=streaming)
    text = (
        "".join(each.choices[0].delta.content or "" for each in answer)
        if streaming
        else answer.choices[0].message.content
    )
    assert 1 <= json.loads(text)["page"] <= 9


def test_any_object(client_and_engine):
    client, _ = client_and_engine
    answer = ask_for(client, response_format={"type": "json_object"}, max_tokens=5)
    assert answer.choices[0].message.content.startswith("{")
    assert ask_for(client, response_format={"type": "text"}, max_tokens=1).choices


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [SEARCH], "tool_choice": "jump"}, "tool_choice"),
        ({"tool_choice": "required"}, "tools"),
        ({"tools": 5}, "tools"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ],
)
def test_what_is_wrong_is_named(client, given, param):
    response = client.post(CHAT, json=chat(**given))
    refused(response, 400)
    assert response.json()["error"]["param"].startswith(param)


def test_a_schema_that_cannot_be_followed(client_and_engine):
    client, _ = client_and_engine
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(BadRequestError, match="nonsense"):
        ask_for(client, response_format=form)


def test_the_sink_has_the_tools(client, kv):
    template = [{"role": "user", "content": "{context}"}]
    found = client.post("/v1/sink", json={"template": template, "tools": [SEARCH]}).json()
    assert found["sink"] == kv.sink_from(template, [SEARCH])
    assert "Searches." in found["sink"]
