"""Tools and response formats in OpenAI's form, by its own package."""

import json

import pytest
from openai import OpenAI
from tiny import some_chunks

from ragkv import Chat
from ragkv.client import RemoteRagKV

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
    kv = make_engine(layers=4)
    server = listen(kv)
    return OpenAI(base_url=f"{server.url}/v1", api_key="none"), kv


def ask_for(client, **given):
    return client.chat.completions.create(
        model="default", **{"messages": ASKED, "max_tokens": 100, **given}
    )


def ended(client, streaming, **given):
    """Return an answer's choice, as the openai package reads it, whole or streamed."""
    given = {"model": "default", "messages": ASKED, "max_tokens": 200, **given}
    if not streaming:
        return client.chat.completions.create(**given).choices[0]
    with client.chat.completions.stream(**given) as stream:
        for event in stream:
            if event.type == "chunk":
                snapshot = event.snapshot
    return snapshot.choices[0]


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
@pytest.mark.parametrize(("parallel", "count"), [(True, 2), (None, 2), (False, 1)])
def test_one_call_at_most(client_and_engine, make_say, parallel, count, streaming):
    client, kv = client_and_engine
    make_say(kv, f"Look: {CALL}\n{CALL}")
    answer = ended(client, streaming, tools=[SEARCH], parallel_tool_calls=parallel)
    assert [each.function.name for each in answer.message.tool_calls] == ["search"] * count
    assert (answer.message.content, answer.finish_reason) == ("Look:", "tool_calls")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("tokens", "arguments"), [(1, None), (9, None), (26, '{"page')])
def test_a_forced_call_that_is_cut_off(client_and_engine, make_say, tokens, arguments, streaming):
    """It is text before its arguments begin; then it is a call with its name."""
    client, kv = client_and_engine
    make_say(kv, forced := '{"name": "search", "arguments": {"page": 5}}')
    given = {"tools": [SEARCH], "tool_choice": "required", "max_tokens": tokens}
    answer = ended(client, streaming, **given)
    assert answer.finish_reason == "length"
    calls = [each.function for each in answer.message.tool_calls or ()]
    begun = answer.message.content or ""
    assert forced.startswith(begun)
    assert bool(begun) == (arguments is None)
    assert [each.name for each in calls] == ["search"] * (arguments is not None)
    assert all(each.arguments.startswith(arguments) for each in calls)
    chat = Chat(ASKED, [SEARCH], "any")
    with RemoteRagKV(str(client.base_url)) as remote:
        there, here = (each.generate(chat, max_new_tokens=tokens) for each in (remote, kv))
    assert there.text == here.text
    assert there.openai_finish_reason == here.openai_finish_reason == "length"
    found, expected = (
        [(call.name, call.text) for call in each.invalid_tool_calls] for each in (there, here)
    )
    assert found == expected


def test_the_client_asks_for_one_call(client_and_engine, make_say):
    client, kv = client_and_engine
    make_say(kv, CALL + CALL)
    with RemoteRagKV(str(client.base_url)) as remote:
        both, one = (
            remote.generate(Chat(ASKED, [SEARCH], parallel_tool_calls=parallel))
            for parallel in (True, False)
        )
    assert (len(both.tool_calls), len(one.tool_calls)) == (2, 1)
    assert one.report.decode.tokens < both.report.decode.tokens


@pytest.mark.parametrize("streaming", [False, True])
def test_a_response_format(client_and_engine, streaming):
    client, _ = client_and_engine
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    answer = ended(client, streaming, response_format=form)
    assert 1 <= json.loads(answer.message.content)["page"] <= 9


def test_a_response_format_beside_tools(client_and_engine, make_say):
    """An answer is a call or in that form; a call that has to be made is one."""
    client, kv = client_and_engine
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    make_say(kv, CALL, "On page 5.", '{"name": "search", "arguments": {"page": 5}}')
    called, answered, forced = (
        ended(client, streaming=False, tools=[SEARCH], response_format=form, tool_choice=choice)
        for choice in ("auto", "auto", "required")
    )
    assert [answer.finish_reason for answer in (called, answered, forced)] == [
        *("tool_calls", "stop", "tool_calls")
    ]
    assert json.loads(answered.message.content).keys() == {"page"}
    for answer in (called, forced):
        assert json.loads(answer.message.tool_calls[0].function.arguments) == {"page": 5}


def test_any_object(client_and_engine):
    client, _ = client_and_engine
    answer = ask_for(client, response_format={"type": "json_object"}, max_tokens=5)
    assert answer.choices[0].message.content.startswith("{")
    assert ask_for(client, response_format={"type": "text"}, max_tokens=1).choices


def test_the_sink_has_the_tools(client, kv):
    template = [{"role": "user", "content": "{context}"}]
    found = client.post("/v1/sink", json={"template": template, "tools": [SEARCH]}).json()
    assert found["sink"] == kv.sink_from(template, [SEARCH])
    assert "Searches." in found["sink"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"), [("arguments", '{"name": "search", "'), ("search", '{"name": "')]
)
def test_a_stop_text_before_the_arguments_leaves_no_call(
    client_and_engine, make_say, stop, text, streaming
):
    client, kv = client_and_engine
    make_say(kv, CALL)
    choice = ended(client, streaming, tools=[SEARCH], stop=[stop])
    assert not choice.message.tool_calls
    assert choice.finish_reason == "stop"
    assert choice.message.content == text
