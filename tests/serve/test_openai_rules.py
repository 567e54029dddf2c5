"""What OpenAI's API refuses and has beside answers, by the ``openai`` package and by hand."""

import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openai import BadRequestError, OpenAI
from served import CHAT, CHUNKS, TEXT, chat, client_of, refused
from tiny import ask, tiny_model, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from ragkv import Chat, RagKV
from ragkv.client import RemoteRagKV
from ragkv.errors import ConfigError

ONE = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
ODD_FORMAT = {"type": "object", "properties": {"a": {"format": []}}}
NO_PARAMETERS = [[], {"type": "string"}, {"type": ["array", "null"]}, True]


def tool(name: str, parameters: object = ONE) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def called(*ids: str) -> dict[str, Any]:
    calls = [
        {"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for each in ids
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "5"}


USER = {"role": "user", "content": "Go."}
TOOLS = [tool("f"), tool("g"), tool("h")]
SCHEMA = {"name": "s", "schema": {"type": "object"}}


@pytest.fixture
def openai_client(listen) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{listen().url}/v1", api_key="none", max_retries=0) as client:
        yield client


REFUSED = [
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed when 'stream'"),
    ({"stream": False, "stream_options": {}}, "stream_options", "only allowed when 'stream'"),
    ({"top_logprobs": 2}, "top_logprobs", "only allowed when 'logprobs'"),
    ({"top_logprobs": 2, "logprobs": False}, "top_logprobs", "only allowed when 'logprobs'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
        "response_format.json_schema.schema",
        "Missing",
    ),
    ({"tool_choice": "required"}, "tools", "tool_choice 'required' needs a tool"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "k"}}},
        "tool_choice",
        "auto, none, required, f, g, h, not ",
    ),
    ({"tools": TOOLS, "tool_choice": allowed("auto", "k")}, "tool_choice", "names k"),
    ({"tools": TOOLS, "tool_choice": allowed("required")}, "tool_choice", "must have a tool"),
    ({"tools": TOOLS, "tool_choice": allowed("none", "f")}, None, "'auto' or 'required'"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice", "type 'custom'"),
    ({"tools": TOOLS, "tool_choice": "jump"}, "tool_choice", "Input should be"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"tools": 5}, "tools", "list"),
    ({"tool_choice": "sometimes"}, "tool_choice", "'required'"),
    (
        {"tools": [tool("f", ODD_FORMAT)], "tool_choice": "required"},
        *("tools", "format must be"),
    ),
    ({"stop": [f"s{at}" for at in range(20)]}, "stop", "at most 16"),
    ({"stop": ["a", 5]}, "stop.1", "string"),
    ({"ragkv": {"recompute_ratio": "x"}}, "ragkv.recompute_ratio", "number"),
    ({"stop": 5}, "stop", "string"),
    ({"tools": [{"type": "function"}]}, "tools", "a tool must be"),
    *(({"tools": [tool("f", each)]}, "tools", "'f' must be") for each in NO_PARAMETERS),
    ({"functions": [{"name": "f"}]}, "functions", "use 'tools'"),
    ({"function_call": [{"name": "f"}]}, "function_call", "use 'tool_choice'"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "'json_schema'"),
    ({"tools": [tool("f"), tool("f")]}, "tools", "two have the name 'f'"),
    ({"tools": [tool("")]}, "tools", "must have a name"),
    ({"tools": [tool(" ")]}, "tools", "must have a name"),
    ({"messages": [USER, result("a")]}, "messages.1.tool_call_id", "earlier message's tool_calls"),
    ({"messages": [result("a"), USER]}, "messages.0.tool_call_id", "tool_calls, not 'a'"),
    ({"messages": [USER, called("a", "b"), result("c")]}, "messages.2.tool_call_id", "are a, b"),
    (
        {"messages": [USER, result("a"), called("a")]},
        "messages.1.tool_call_id",
        "tool_calls, not 'a'",
    ),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED)
def test_what_openai_refuses(client, fields, param, said):
    assert said in refused(client.post(CHAT, json=chat(**fields)), 400, param=param)


@pytest.mark.parametrize("fields", [each[0] for each in REFUSED[::4]])
def test_and_the_openai_package_is_told_so(openai_client, fields):
    given = {"messages": ask(CHUNKS), "max_tokens": 2, **fields}
    with pytest.raises(BadRequestError) as error:
        openai_client.chat.completions.create(model="default", **given)
    assert error.value.request_id


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": False, "stream_options": None},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": True, "top_logprobs": 0},
        {"top_logprobs": None},
        {"messages": [USER, called("a", "b"), result("b"), result("a"), USER]},
        {"messages": [USER, called("a"), result("a"), called("b"), result("b"), result("a")]},
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        {"tools": [tool("a.b"), tool("a-b"), tool("names with blanks"), tool("ö" * 80)]},
    ],
)
def test_what_it_accepts(client, fields):
    assert client.post(CHAT, json=chat(**fields)).status_code == 200


def test_text_completions_have_the_same_rule(client):
    body = {"prompt": "a", "max_tokens": 1, "stream_options": {"include_usage": True}}
    refused(client.post(TEXT, json=body), 400, param="stream_options")
    assert client.post(TEXT, json={**body, "stream": True}).status_code == 200


@pytest.mark.parametrize("names", [("g",), ("f", "h"), ("f", "g", "h")])
def test_one_of_the_allowed_tools_is_called(openai_client, names):
    answer = openai_client.chat.completions.create(
        model="default",
        messages=ask(CHUNKS),
        max_tokens=60,
        tools=TOOLS,
        tool_choice=allowed("required", *names),
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name in names


@pytest.mark.parametrize(("name", "read"), [("g", True), ("f", False)])
def test_of_the_others_no_call_is_read(client, kv, make_say, name, read):
    said = json.dumps({"name": name, "arguments": {"x": 1}})
    given = {"tools": TOOLS, "tool_choice": allowed("auto", "g", "h"), "max_tokens": 60}
    for streaming in (False, True):
        make_say(kv, f"<tool_call>\n{said}\n</tool_call>")
        chosen = ask_either(client, {**given, "stream": streaming})
        assert chosen["finish_reason"] == ("tool_calls" if read else "stop")
        assert [each["function"]["name"] for each in chosen["tool_calls"]] == [name] * read
        assert (said in chosen["content"]) is not read


def ask_either(client, fields: dict[str, Any]) -> dict[str, Any]:
    """Return what an answer has, in a stream or not."""
    response = client.post(CHAT, json=chat(**fields))
    if not fields["stream"]:
        (choice,) = response.json()["choices"]
        message = choice["message"]
        parts = [{**choice, "delta": message}]
    else:
        lines = [line for line in response.text.split("\n\n") if line and "[DONE]" not in line]
        parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    deltas = [part["delta"] for part in parts]
    return {
        "finish_reason": parts[-1]["finish_reason"],
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "tool_calls": [call for delta in deltas for call in delta.get("tool_calls") or ()],
    }


def test_the_client_of_a_server_says_which_are_allowed(listen):
    with RemoteRagKV(listen().url) as remote:
        for names in (["g"], ["h"]):
            prompt = Chat(ask(CHUNKS), TOOLS, allowed("required", *names))
            (call,) = remote.generate(prompt, max_new_tokens=60).tool_calls
            assert call.name == names[0]


def test_the_prompt_has_all_tools_whichever_are_allowed(kv):
    every = kv.prefill(Chat(ask(CHUNKS), TOOLS)).token_ids
    assert kv.prefill(Chat(ask(CHUNKS), TOOLS, allowed("auto", "g"))).token_ids == every


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": [tool("f"), tool("f")]},
        {"tools": [tool("")]},
        {"tools": TOOLS, "tool_choice": allowed("auto")},
        {"tools": TOOLS, "tool_choice": allowed("auto", "k")},
        {"tool_choice": "required"},
        {"tool_choice": "any"},
    ],
)
def test_the_core_has_the_same_rules(wrong):
    choice = wrong.get("tool_choice", "tool")
    with pytest.raises(ConfigError, match=choice if isinstance(choice, str) else "allowed_tools"):
        Chat([USER], **wrong)


# ---- x-request-id


def test_every_response_has_an_id(client, kv, monkeypatch):
    paths = [("GET", "/health"), ("GET", "/metrics"), ("GET", "/no"), ("POST", CHAT), ("PUT", CHAT)]
    seen = [client.request(*path, json={}).headers["x-request-id"] for path in paths]
    seen.append(client.post(CHAT, json=chat(stream=True)).headers["x-request-id"])
    assert len(set(seen)) == len(seen)
    assert all(each.startswith("req_") for each in seen)


@pytest.mark.parametrize("given", ["abc-1", "0af7651916cd43dd8448eb211c80319c", "a/b:c=1"])
def test_the_client_s_own_id_comes_back(client, given):
    for body in (chat(), chat(stream=True), {"no": 1}):
        response = client.post(CHAT, json=body, headers={"X-Request-Id": given})
        assert response.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "\u00e4".encode(), b"a\tb"])
def test_what_may_harm_a_log_does_not(client, given):
    response = client.get("/health", headers={"x-request-id": given})
    assert response.headers["x-request-id"].startswith("req_")


def test_the_log_names_the_request(kv, monkeypatch, caplog):
    monkeypatch.setattr(type(kv), "sink_from", None)
    with client_of(kv, raise_errors=False) as client, caplog.at_level(logging.ERROR):
        headers = {"x-request-id": "mine-7"}
        response = client.post("/v1/sink", json={"template": "a"}, headers=headers)
        assert response.headers["x-request-id"] == "mine-7"
        refused(response, 500)
    assert "the request mine-7 failed" in caplog.text


# ---- tokens


@pytest.fixture
def bos_client() -> Iterator[TestClient]:
    """Return a client of a model whose tokenizer puts a token before every text."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    with (
        RagKV(tiny_model(), tokenizer, store=":memory:") as kv,
        client_of(kv) as client,
    ):
        yield client


def test_special_tokens_are_added_or_not(bos_client):
    def tokens(**body):
        found = bos_client.post("/tokenize", json=body).json()
        assert found["count"] == len(found["tokens"])
        return found["tokens"]

    plain = tokens(prompt="A text.", add_special_tokens=False)
    assert tokens(prompt="A text.") == tokens(prompt="A text.", add_special_tokens=True)
    assert tokens(prompt="A text.") == [0, *plain]
    rendered = tokens(messages=ask(CHUNKS))
    assert rendered == tokens(messages=ask(CHUNKS), add_special_tokens=False)
    assert tokens(messages=ask(CHUNKS), add_special_tokens=True) == [0, *rendered]
