"""Earlier messages as clients send them back: what changes nothing is taken, what is wrong named."""

from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from served import CHAT, refused
from tiny import some_chunks

from ragkv import Chat
from ragkv.prompt.render import render

ASKED = {"role": "user", "content": "Where?"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "ok"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def post(client, messages: list[Any], **fields: Any):
    return client.post(CHAT, json={"messages": messages, "max_tokens": 2, **fields})


def tokens(client, *messages: Any) -> int:
    response = post(client, list(messages))
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "more",
    [
        {"id": "msg_1"},
        {"index": 0, "finish_reason": "stop", "logprobs": None},
        {"reasoning": "Hm."},
        {"reasoning_content": "Hm."},
        {"reasoning_content": None, "reasoning_details": []},
        {"reasoning": {"text": "Hm."}},
        {"annotations": [], "refusal": None, "audio": None, "function_call": None},
        {"parsed": None, "tool_calls": None, "name": None, "tool_call_id": None},
        {"thinking_blocks": [{"type": "thinking"}], "provider_specific_fields": {"a": None}},
        {
            "created_at": "now",
            "usage": {"total_tokens": 5},
            "status": "completed",
            "type": "message",
        },
    ],
)
def test_what_clients_keep_of_an_answer_changes_nothing(client, more):
    said = {"role": "assistant", "content": "There."}
    assert tokens(client, ASKED, {**said, **more}, ASKED) == tokens(client, ASKED, said, ASKED)


@pytest.mark.parametrize(
    "more",
    [
        {"index": 0},
        {"index": None, "type": None},
        {"extra_content": {"google": {}}},
        {"function": {**CALL["function"], "parsed_arguments": {"x": 1}}},
        {"function": {"name": "f", "arguments": {"x": 1}}},
    ],
)
def test_what_clients_keep_of_a_call_changes_nothing(client, more):
    def count(call):
        called = {"role": "assistant", "content": None, "tool_calls": [call]}
        return tokens(client, ASKED, called, RESULT)

    assert count({**CALL, **more}) == count(CALL)


@pytest.mark.parametrize(
    "arguments", ['"Beijing"', '["x"]', "5", "true", '{"a": 1', "[" * 50_000, "x", 5, ["x"], False]
)
def test_arguments_that_are_no_object_are_named(client, arguments):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL, call]}
    response = post(client, [ASKED, called, RESULT])
    param = "messages.1.tool_calls.1.function.arguments"
    assert "JSON" in refused(response, 400, code="invalid_value", param=param)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, "function.name"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "tool_calls.0.function"),
        ({"role": "assistant", "tool_calls": "f"}, "messages.1.tool_calls"),
        ({"role": "tool", "tool_call_id": 5, "content": "x"}, "messages.1.tool_call_id"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages"),
        (None, "messages.1"),
    ],
)
def test_what_is_wrong_is_named(client, message, param):
    response = post(client, [ASKED, message])
    refused(response, 400)
    assert param in response.json()["error"]["param"]


@pytest.mark.parametrize(
    "fields",
    [
        {"stream_options": {"include_usage": None}, "stream": True},
        {"ragkv": {"sink": None, "recompute_ratio": None, "retrieved": None, "report": None}},
        {"tools": [{"type": None, "function": {**TOOL["function"], "description": None, "strict": None}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": None}}]},
        {"tools": [TOOL], "tool_choice": {"type": None, "function": {"name": "f", "x": None}}},
        {"tools": [TOOL], "tool_choice": None, "parallel_tool_calls": None},
        {"response_format": {"type": "text", "json_schema": None}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": None, "description": None, "schema": SCHEMA}}},
        {"chat_template_kwargs": None, "logit_bias": None, "user": None},
    ],
)  # fmt: skip
def test_null_is_absent_at_any_depth(client, fields):
    parts = [{"type": "text", "text": "Where?", "cache_control": None}]
    response = post(client, [{"role": "user", "content": parts, "name": None}], **fields)
    assert response.status_code == 200, response.text


def test_null_is_a_value_in_a_clients_own_json(client, kv, monkeypatch):
    choices = {**SCHEMA, "properties": {"a": {"enum": [None]}}, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": choices}}
    answer = post(client, [ASKED], response_format=form, max_tokens=20).json()
    assert answer["choices"][0]["message"]["content"] == '{"a": null}'
    template = kv.tokenizer.chat_template + "{% if flag is defined %}{{ flag }}{% endif %}"
    monkeypatch.setattr(kv.tokenizer, "chat_template", template)
    body = {"messages": [ASKED], "chat_template_kwargs": {"flag": None}}
    ids = client.post("/tokenize", json=body).json()["tokens"]
    assert kv.tokenizer.decode(ids).endswith("None")


def test_openais_own_answers_go_back(listen, make_engine, make_say):
    """With what its package adds to them, of streams too."""
    kv = make_engine()
    client = OpenAI(base_url=f"{listen(kv).url}/v1", api_key="none", max_retries=0)
    make_say(kv, '<tool_call>{"name": "f", "arguments": {"a": true}}</tool_call>', "Fine.")
    given: dict[str, Any] = {"model": "default", "max_tokens": 100, "tools": [TOOL]}
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    first = client.chat.completions.parse(**{**given, "tools": [strict]}, messages=[ASKED])
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "ok"}
    for form in (message, message.model_dump()):
        again = client.chat.completions.create(**given, messages=[ASKED, form, result])
        assert again.choices[0].message
    with client.chat.completions.stream(**{**given, "tools": [strict]}, messages=[ASKED]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert client.chat.completions.create(**given, messages=[ASKED, message.model_dump(), ASKED])


# ---- variables of the chat template

VARIABLE = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


@pytest.fixture
def thinking(kv, monkeypatch):
    monkeypatch.setattr(kv.tokenizer, "chat_template", kv.tokenizer.chat_template + VARIABLE)
    return kv


def test_variables_of_the_chat_template(thinking, listen):
    client = OpenAI(base_url=f"{listen(thinking).url}/v1", api_key="none", max_retries=0)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    plain, silent = (
        client.chat.completions.create(
            model="default", messages=[ASKED], max_tokens=2, extra_body=more
        ).usage.prompt_tokens
        for more in ({}, off)
    )
    assert (
        silent
        == len(
            thinking.tokenizer(render(Chat([ASKED], **off), thinking.tokenizer).text)["input_ids"]
        )
        > plain
    )
    with pytest.raises(BadRequestError, match="add_generation_prompt") as caught:
        client.chat.completions.create(
            model="default",
            messages=[ASKED],
            extra_body={"chat_template_kwargs": {"add_generation_prompt": False}},
        )
    assert caught.value.param == "chat_template_kwargs"


def test_variables_in_tokens_and_sinks(kv, client, monkeypatch):
    monkeypatch.setattr(kv.tokenizer, "chat_template", VARIABLE + kv.tokenizer.chat_template)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    counts = [
        client.post("/tokenize", json={"messages": [ASKED], **more}).json()["count"]
        for more in ({}, off)
    ]
    assert counts[0] < counts[1]
    template = [{"role": "user", "content": "{context}"}]
    sink = client.post("/v1/sink", json={"template": template, **off}).json()["sink"]
    assert sink == kv.sink_from(template, **off)
    assert sink.startswith("<think></think>")
    assert not kv.sink_from(template).startswith("<think>")


def test_parts_of_documents_are_chunks(client, kv):
    chunks = some_chunks(2)
    kv.precompute(chunks)
    parts = [{"type": "text", "text": f"{chunk}\n\n"} for chunk in chunks]
    response = post(client, [{"role": "user", "content": parts}], ragkv={"report": True})
    assert {each["text"] for each in response.json()["ragkv"]["chunks"]} == set(chunks)
