"""Messages as clients write them become one form; what is wrong says which and where."""

import inspect
import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from templates import tokenizer_of
from tiny import tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from ragkv.config.checks import _SET_BY_RAGKV
from ragkv.errors import ConfigError
from ragkv.prompt.chat import Chat, prompt_of
from ragkv.prompt.messages import normal_messages
from ragkv.prompt.render import render, template_head

HELLO = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
NOT_OBJECTS = [
    '"Beijing"',
    '["x"]',
    "5",
    "true",
    '{"a": 1',
    "[" * 100_000,
    "[]",
    "x",
    5,
    ["x"],
    True,
]


def call(arguments: object = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}, **more}


def asks(*calls: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": list(calls)},
    ]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("parts", [HELLO, tuple(HELLO), [{"type": "input_text", "text": "hello"}]])
def test_parts_are_joined(role, parts):
    (message,) = normal_messages([{"role": role, "content": parts}])
    assert message["content"] == "hello"
    assert message["role"] == ("system" if role == "developer" else role)


@pytest.mark.parametrize("tools", [(), (TOOL,)])
def test_parts_make_the_prompt_that_their_text_makes(tools):
    def prompt(content):
        history = asks(call(id="c"))
        return Chat([{"role": "system", "content": content}, *history, {"role": "tool", "content": content}], tools)  # fmt: skip

    tokenizer = tiny_tokenizer()
    assert render(prompt(HELLO), tokenizer) == render(prompt("hello"), tokenizer)
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "About {context}"}]}]
    in_text = [{"role": "user", "content": "About {context}"}]
    assert template_head(in_parts, tokenizer) == template_head(in_text, tokenizer)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], r"messages\[1\].*'image_url'"),
        ([*HELLO, {"type": "input_audio"}], r"messages\[1\].*'input_audio'"),
        ([{"type": "video", "text": "x"}], r"messages\[1\].*'video'"),
        ([{"text": "x"}], r"messages\[1\].*None"),
        (["x"], r"messages\[1\].*'str'"),
        ([{"type": "text"}], r"messages\[1\].*must have a text"),
        ([{"type": "text", "text": 5}], r"messages\[1\].*must have a text"),
        (5, r"messages\[1\].*content must be"),
        ({"text": "x"}, r"messages\[1\].*content must be"),
    ],
)
def test_what_is_no_text_is_named(content, named):
    with pytest.raises(ConfigError, match=named):
        Chat([{"role": "user", "content": "x"}, {"role": "user", "content": content}])


def test_blocks_of_a_model_that_thinks_are_no_text():
    content = [{"type": "thinking", "thinking": "Hm."}, *HELLO, {"type": "tool_use", "input": {}}]
    (message,) = normal_messages([{"role": "assistant", "content": content}])
    assert message["content"] == "hello"


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": {"b": null}}', {"a": {"b": None}}),
        ({"a": 1}, {"a": 1}),
        ("{}", {}),
        ("null", {}),
        (None, {}),
        ("", {}),
        (" \n", {}),
    ],
)
def test_arguments_are_an_object(arguments, read):
    _, message = normal_messages(asks(call(arguments)))
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": read}


@pytest.mark.parametrize("arguments", NOT_OBJECTS)
def test_arguments_that_are_no_object_are_named(arguments):
    prompt = asks(call(id="a"), call(arguments, id="b"))
    with pytest.raises(ConfigError, match=r"messages\[1\]\.tool_calls\[1\], a call of 'f': .*JSON"):
        Chat(prompt)


@pytest.mark.parametrize(
    "wrong",
    [{}, {"function": {}}, {"function": {"name": ""}}, {"function": {"name": 5}}, "f", None],
)
def test_calls_without_a_name_are_named(wrong):
    with pytest.raises(ConfigError, match=r"messages\[1\]\.tool_calls\[0\].*function's name"):
        Chat(asks(wrong))


@pytest.mark.parametrize(
    "wrong", [5, None, {"role": "user"}, [5], [{"content": "x"}], [{"role": 5, "content": ""}], [{"role": "user"}], b"x"]
)  # fmt: skip
def test_what_are_no_messages(wrong):
    with pytest.raises(ConfigError, match="messages"):
        prompt_of(wrong)


def test_results_name_their_calls():
    messages = normal_messages(
        [
            *asks(call(id="a"), {**call(id="b"), "function": {"name": "g", "arguments": "{}"}}),
            {"role": "tool", "tool_call_id": "b", "content": "1"},
            {"role": "tool", "tool_call_id": "", "name": None, "content": "2"},
            {"role": "tool", "tool_call_id": "b", "content": "again"},
            {"role": "tool", "tool_call_id": "z", "content": "of no call"},
            *asks(call(), call()),
            {"role": "tool", "content": "first"},
            {"role": "tool", "content": "second"},
            {"role": "tool", "content": "of no call"},
            {"role": "function", "name": "own", "content": "3"},
        ]
    )
    results = [each for each in messages if each["role"] == "tool"]
    assert [(each.get("name"), each.get("tool_call_id")) for each in results[:4]] == [
        *(("g", "b"), ("f", "a"), ("g", "b"), (None, "z"))
    ]
    made = [each["id"] for each in messages[7]["tool_calls"]]
    assert [each.get("tool_call_id") for each in results[4:]] == [*made, None, None]
    assert len(set(made)) == 2
    assert all(len(each) == 9 and each.isalnum() for each in made)
    assert results[-1]["name"] == "own"


def test_a_name_says_which_call_a_result_is_of():
    g = {"type": "function", "function": {"name": "g", "arguments": {}}}
    *_, first, second = normal_messages(
        [
            *asks(call(id="a"), {**g, "id": "b"}),
            {"role": "tool", "name": "g", "content": "1"},
            {"role": "tool", "name": "f", "content": "2"},
        ]
    )
    assert (first["tool_call_id"], second["tool_call_id"]) == ("b", "a")


def test_it_changes_nothing_in_what_it_returned():
    once = normal_messages([*asks(call(), call(id="b")), {"role": "tool", "content": HELLO}])
    assert normal_messages(once) == once
    assert list(Chat(Chat(once))) == list(once)


def test_the_users_own_messages_stay_as_they_are():
    messages = [*asks(call('{"a": 1}')), {"role": "tool", "content": HELLO}]
    before = json.dumps(messages)
    render(Chat(messages, [TOOL]), tokenizer_of("mistral"))
    assert json.dumps(messages) == before


def test_openais_own_messages():
    message = ChatCompletionMessage.model_validate(
        {**asks(call('{"a": 1}', id="c", index=0))[1], "refusal": None, "audio": None}
    )
    older = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "f", "arguments": "{}"},
    }
    first, second = normal_messages([message.model_dump(), older])
    assert normal_messages([message, older]) == (first, second)
    assert first == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }  # fmt: skip
    assert second["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


# ---- variables of a chat template


@pytest.mark.parametrize("name", sorted(_SET_BY_RAGKV))
def test_what_ragkv_sets_is_no_variable(name):
    with pytest.raises(ConfigError, match=name):
        Chat([], chat_template_kwargs={name: True})


def test_all_arguments_of_rendering_are_ragkvs_to_set():
    own = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    assert own.keys() - {"self", "kwargs", "documents"} <= _SET_BY_RAGKV


@pytest.mark.parametrize("wrong", [5, "enable_thinking", [("a", 1)], {5: 1}])
def test_variables_are_a_dict(wrong):
    with pytest.raises(ConfigError, match="must be a dict"):
        prompt_of([{"role": "user", "content": "x"}], wrong)


def test_variables_reach_the_template():
    tokenizer, asked = tokenizer_of("qwen3"), [{"role": "user", "content": "x"}]
    thinks = render(asked, tokenizer).text
    off = {"enable_thinking": False}
    silent = render(prompt_of(asked, off), tokenizer).text
    assert silent == f"{thinks}<think>\n\n</think>\n\n"
    assert render(Chat(asked, chat_template_kwargs=off), tokenizer).text == silent
    again = prompt_of(Chat(asked, [TOOL], chat_template_kwargs=off), {"enable_thinking": True})
    assert again.chat_template_kwargs == {"enable_thinking": True}
    assert len(again.tools) == 1
    with pytest.raises(ConfigError, match="text"):
        prompt_of("x", off)
    assert prompt_of("x", {}) == "x"
