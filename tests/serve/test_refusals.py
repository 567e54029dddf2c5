"""What is refused, and in which form."""

import gzip
import json
import time
from typing import get_type_hints

import pytest
import torch
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as TextParams
from served import CHAT, TEXT, chat, client_of, refused

from ragkv.errors import StoreError, StoreFullError
from ragkv.model.workspace import Workspace
from ragkv.serve.chunks import ChunkFields
from ragkv.serve.fields import IGNORED, NEUTRAL, ChatFields, CompletionFields, parse, prompts_in
from ragkv.serve.refusal import RefusedError

USER = {"role": "user", "content": "Hi"}
NO_TEXTS = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]},
    {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
    {"role": "user", "content": ["text"]},
    {"role": "function", "content": "5", "name": "f"},
    {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("logit_bias", {"5": -100}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "high"),
        ("web_search_options", {}),
        ("echo", True),
        ("best_of", 2),
        ("suffix", "."),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(client, field, value):
    message = refused(
        client.post(CHAT, json=chat(**{field: value})),
        *(400,),
        code="unsupported_parameter",
        param=field,
    )
    assert field in message


def test_what_changes_nothing_is_ignored(client):
    fields = {name: {"some": "thing"} for name in IGNORED}
    fields |= {name: values[0] for name, values in NEUTRAL.items() if values}
    plain = client.post(CHAT, json=chat()).json()["choices"]
    assert client.post(CHAT, json=chat(**fields)).json()["choices"] == plain
    nulls = dict.fromkeys([*NEUTRAL, *IGNORED, "stop", "seed", "n", "stream_options", "ragkv"])
    assert client.post(CHAT, json=chat(**nulls)).json()["choices"] == plain


@pytest.mark.parametrize("wrong", [True, "a", [1], {}, {"a": True}])
@pytest.mark.parametrize("place", ["property", "object"])
def test_required_is_a_list_of_names(client, wrong, place):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    (schema if place == "object" else schema["properties"]["a"])["required"] = wrong
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    response = client.post(CHAT, json=chat(tools=tools, tool_choice="required"))
    assert "required must be a list of names beside properties" in refused(
        response, 400, param="tools"
    )
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    response = client.post(CHAT, json=chat(response_format=form))
    assert "required must be a list" in refused(response, 400, param="response_format")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"guided_json": {}}, "guided_json", "unknown_parameter"),
        ({"ragkv": {"auxiliary_model": "/etc"}}, "ragkv.auxiliary_model", "unknown_parameter"),
        ({"stream_options": {"usage": True}}, "stream_options.", "unknown_parameter"),
        ({"messages": [{**USER, "weight": 2}]}, "messages.0.weight", "unknown_parameter"),
        *(({"messages": [each]}, "messages", "unsupported_parameter") for each in NO_TEXTS),
    ],
)
def test_fields_that_are_not_read_are_refused_by_name(client, fields, param, code):
    response = client.post(CHAT, json=chat(**fields))
    message = refused(response, 400, code=code)
    assert response.json()["error"]["param"].startswith(param)
    assert param in message or code == "unsupported_parameter"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "BR", "gzip, identity"])
def test_a_compressed_body_is_refused_by_its_encoding(client, encoding):
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    response = client.post(CHAT, content=gzip.compress(b"{}"), headers=headers)
    message = refused(response, 415, code="unsupported_content_encoding")
    assert f"Content-Encoding: {encoding.lower()}" in message
    headers["Content-Encoding"] = "identity"
    assert client.post(CHAT, json=chat(), headers=headers).status_code == 200


def test_every_field_of_openais_api_is_known_by_name():
    for params, fields in ((ChatParams, ChatFields), (TextParams, CompletionFields)):
        known = {*fields.model_fields, *IGNORED, *NEUTRAL}
        assert not get_type_hints(params).keys() - known


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
        ({"stop": "\ud800"}, None),
        ({"model": "\ud800"}, "model"),
        ({"\ud800": 1}, None),
        ({"ragkv": {"sink": "\ud800"}}, None),
        ({"ragkv": {"recompute_ratio": 2}}, "ragkv.recompute_ratio"),
        ({"ragkv": {"recompute_ratio": "some"}}, "ragkv.recompute_ratio"),
        ({"ragkv": {"method": "magic"}}, "ragkv.method"),
        ({"ragkv": {"method": "../query"}}, "ragkv.method"),
        ({"ragkv": {"retrieved": "text"}}, "ragkv.retrieved"),
        ({"ragkv": 5}, "ragkv"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_wrong_values_are_refused_by_name(client, fields, param):
    body = json.dumps(chat(**fields))
    response = client.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    refused(response, 404 if "model" in fields else 400, param=param)


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [5, "a"], 5, [-1], [600], [[5], [10**12]], {"a": 1}, ""]
)
def test_prompts_that_are_none(client, prompt):
    refused(client.post(TEXT, json={"prompt": prompt, "max_tokens": 2}), 400)


def test_millions_of_wrong_values_are_one_error():
    """Each error of a validation costs more than the value."""
    many = [5, *["a"] * 300_000]
    started = time.process_time()
    for kind, body in (
        (CompletionFields, {"prompt": "a", "stop": many}),
        (ChatFields, {"messages": many}),
        (ChunkFields, {"texts": many}),
    ):
        with pytest.raises(RefusedError):
            parse(kind, body)
    with pytest.raises(RefusedError):
        prompts_in(many)
    assert time.process_time() - started < 1


def test_a_prompt_that_is_too_long_by_far_is_not_tokenised(client, kv, monkeypatch):
    monkeypatch.setattr(kv, "stream", None)
    prompt = "word " * 200_000
    messages = [{"role": "user", "content": prompt}]
    for path, body in ((TEXT, {"prompt": prompt}), (CHAT, {"messages": messages})):
        refused(client.post(path, json=body), 400, code="context_length_exceeded")
        refused(client.post("/tokenize", json=body), 400, code="context_length_exceeded")


def test_too_many_prompts_or_tokens_are_not_decoded(client, kv, monkeypatch):
    monkeypatch.setattr(type(kv.tokenizer), "decode", None)
    refused(client.post(TEXT, json={"prompt": [[5]] * 17}), 400, code="too_large")
    refused(client.post(TEXT, json={"prompt": [5] * 4097}), 400, code="context_length_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(client, stream):
    long = [{"role": "user", "content": "word " * 5000}]
    response = client.post(CHAT, json=chat(messages=long, stream=stream))
    message = refused(response, 400, code="context_length_exceeded")
    assert "4096" in message


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b'{"a": NaN}', b"\xff", b"[" * 100_000, b"9" * 5000]
)
def test_bodies_that_are_no_json_object(client, body):
    headers = {"Content-Type": "application/json"}
    refused(client.post(CHAT, content=body, headers=headers), 400, code="invalid_json")


def test_a_list_of_wrong_messages_names_its_first(client):
    for wrong in ([5], [["a"]], ["a"]):
        said = refused(client.post("/v1/sink", json={"template": wrong}), 400, param="template.0")
        assert "dict" in said


def test_other_content_types(client):
    """Pages in browsers may send forms and plain text to any address, JSON only with leave."""
    body = json.dumps(chat())
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        refused(client.post(CHAT, content=body, headers={"Content-Type": kind}), 415)


def test_other_ways(client):
    refused(client.get("/v2/chat"), 404, code="not_found")
    refused(client.get(CHAT), 405, code="method_not_allowed")
    assert client.get("/docs").status_code == client.get("/openapi.json").status_code == 404


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("in /secret/place"), 500),
        (StoreError("no /secret/place"), 503),
        (StoreFullError("/secret/place is full"), 507),
    ],
)
def test_a_failure_tells_nothing_of_the_machine(kv, monkeypatch, error, status, caplog):
    def fail(*_args, **_kwargs):
        raise error

    with client_of(kv, raise_errors=False) as client:
        monkeypatch.setattr(kv, "contains", fail)
        monkeypatch.setattr(kv, "stream", fail)
        for response in (
            client.get("/v1/chunks", params={"text": "x"}),
            client.post(CHAT, json=chat()),
        ):
            assert "secret" not in refused(response, status)
            assert "Traceback" not in response.text
    assert "secret" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_want_of_memory_says_what_to_set_and_the_server_goes_on(kv, monkeypatch, stream):
    with client_of(kv) as client:
        body = chat(stream=stream, max_tokens=2)
        with monkeypatch.context() as patch:
            patch.setattr(Workspace, "uninitialised", fails)
            response = client.post(CHAT, json=body)
        message = refused(response, 503, code="out_of_memory")
        assert "kv_bytes" in message
        assert response.headers["retry-after"]
        assert client.post(CHAT, json=body).status_code == 200


def fails(*_):
    raise torch.OutOfMemoryError("CUDA out of memory.")
