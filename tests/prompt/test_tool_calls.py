"""Tool calls are read as each family of templates writes them, and never raise."""

import copy
import datetime as dt
from decimal import Decimal
from types import MappingProxyType

import pytest
from tiny import tiny_tokenizer

from ragkv.errors import ConfigError
from ragkv.prompt.chat import Chat
from ragkv.prompt.render import render, template_head
from ragkv.prompt.tools import formats
from ragkv.prompt.tools.calls import InvalidToolCall, ToolCall
from ragkv.prompt.tools.reader import CallReader, format_of

FORMATS = {each.name: each for each in formats.FORMATS}
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches the manual.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
TEMPLATES = {
    "hermes": "{{ tools }}<tool_call>",
    "llama3": "{{ tools }}<|python_tag|>",
    "mistral": "{{ tools }}[TOOL_CALLS]",
    "phi": "{{ tools }}<|tool|>",
    "gemma": "{{ tools }}<start_function_call>",
    "gpt_oss": "{{ tools }}<|channel|>commentary to=functions.",
}
ONE = [("search", {"query": "a {b}"})]
TWO = [*ONE, ("look", {})]
WHOLE = [
    ("hermes", '<tool_call>\n{"name": "search", "arguments": {"query": "a {b}"}}\n</tool_call>', ONE),
    (
        "hermes",
        ('<tool_call>{"name": "search", "arguments": {"query": "a {b}"}}</tool_call>\n'
        '<tool_call>{"name": "look", "arguments": {}}'),
        TWO,
    ),
    ("llama3", '{"name": "search", "parameters": {"query": "a {b}"}}', ONE),
    ("llama3", '<|python_tag|>{"name": "search", "parameters": {"query": "a {b}"}}; {"name": "look"}', TWO),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "a {b}"}}, {"name": "look"}]',
        TWO,
    ),
    ("mistral", '[TOOL_CALLS]search[ARGS]{"query": "a {b}"}[TOOL_CALLS]look[ARGS]{}', TWO),
    ("phi", '<|tool_call|>[{"name": "search", "arguments": {"query": "a {b}"}}]<|/tool_call|>', ONE),
    ("phi", 'functools[{"name": "search", "arguments": {"query": "a {b}"}}, {"name": "look"}]', TWO),
    (
        "gemma",
        ("<start_function_call>call:search{query:<escape>a {b}<escape>}<end_function_call>"
        "<start_function_call>call:look{}<end_function_call>"),
        TWO,
    ),
    (
        "gpt_oss",
        ("<|channel|>analysis<|message|>I should search.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.search <|constrain|>json<|message|>{"query": "a {b}"}<|call|>'),
        ONE,
    ),
]  # fmt: skip
BROKEN = [
    ("hermes", '<tool_call>{"name": "search", "arg', 1),
    ("hermes", "<tool_call>search</tool_call>", 1),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 1),
    ("hermes", '<tool_call>{"name": "search", "arguments": [1]}</tool_call>', 1),
    ("llama3", '{"name": "search", "parameters": ', 1),
    ("llama3", '<|python_tag|>{"answer": 5}', 1),
    ("mistral", "[TOOL_CALLS] [{", 1),
    ("mistral", "[TOOL_CALLS]search[ARGS]{1", 1),
    ("phi", "functools[1]", 1),
    ("gemma", "<start_function_call>search<end_function_call>", 1),
    ("gemma", "<start_function_call>call:search{query:}<end_function_call>", 1),
    ("gpt_oss", "<|channel|>commentary to=functions.search<|message|>{", 1),
]


def read(name: str, text: str, size: int) -> tuple[str, str, list]:
    """Return what was let through, the text, and the calls, of an answer in pieces."""
    reader = CallReader(FORMATS[name])
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    passed = "".join(map(reader.feed, pieces))
    return passed, *reader.finish()


def plain(calls: list) -> list[tuple[str, dict]]:
    assert all(isinstance(call, ToolCall) for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    return [(call.name, dict(call.arguments)) for call in calls]


def test_a_format_is_a_file():
    assert set(FORMATS) == set(TEMPLATES)
    for name, template in TEMPLATES.items():
        tokenizer = copy.deepcopy(tiny_tokenizer())
        tokenizer.chat_template = template
        assert format_of(tokenizer).name == name


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(("name", "text", "calls"), WHOLE)
def test_calls_are_read(name, text, calls, size):
    before = {"": ""} if name in {"llama3", "gpt_oss"} else {"": "", "Look.\n\n": "Look."}
    for written, expected in before.items():
        passed, said, found = read(name, written + text, size)
        assert (passed.rstrip(), said) == (expected, expected)
        assert plain(found) == calls


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"gpt_oss"}))
def test_text_without_a_call_passes_as_it_is(name, size):
    text = " See <b>1</b> {not a call} [x] func(1) <tool \n"
    passed, said, found = read(name, text, size)
    assert (said, found) == (text, [])
    assert text.startswith(passed)
    assert len(passed) > len(text) - 8


def test_an_answer_of_llama_that_is_json_is_text():
    assert read("llama3", '{"answer": 5}', 3)[1:] == ('{"answer": 5}', [])


def test_the_final_channel_is_the_text():
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 5."
    assert read("gpt_oss", text, 4)[1:] == ("It is 5.", [])
    assert read("gpt_oss", "It is 5.", 4)[1:] == ("It is 5.", [])


@pytest.mark.parametrize(("name", "text", "count"), BROKEN)
def test_broken_calls_are_invalid_calls(name, text, count):
    _, _, found = read(name, text, 1000)
    assert [type(call) for call in found] == [InvalidToolCall] * count
    assert found[0].error
    assert found[0].text


def test_an_answer_that_is_one_call_by_construction():
    reader = CallReader(None)
    assert reader.feed('{"name": "search", "arguments": {"query": "x"}}') == ""
    text, calls = reader.finish()
    assert (text, plain(calls)) == ("", [("search", {"query": "x"})])


# ---- prompts with tools


def test_definitions_go_through_the_template():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = (
        "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}"
        "{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "search", "arguments": '{"query": "x"}'}}
    messages = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "Here.", "tool_call_id": "123456789"},
    ]
    text = render(Chat(messages, [TOOL]), tokenizer).text
    head = template_head([{"role": "user", "content": "{context}"}], tokenizer, [TOOL])
    assert text.startswith(head)
    assert "Searches the manual." in head
    assert '<tool_call>{"name": "search", "arguments": {"query": "x"}}' in text
    assert text.endswith("[tool]Here.")


def test_tools_that_are_none_and_that_are_no_list():
    messages = [{"role": "user", "content": "Where?"}]
    assert Chat(messages, None).tools == ()
    with pytest.raises(ConfigError, match="must be a list"):
        Chat(messages, 3)


@pytest.mark.parametrize("value", [{1, 2}, dt.date(2026, 1, 1), Decimal("1.5"), b"x", [object()]])
def test_what_json_cannot_say_is_refused(value):
    """transformers' templates write ``<date>`` for a date, without a word."""
    call = {"function": {"name": "search", "arguments": {"query": value}}}
    messages = [{"role": "user", "content": "Where?"}]
    with pytest.raises(ConfigError, match=r"a call of 'search'.*must be JSON"):
        Chat([*messages, {"role": "assistant", "tool_calls": [call]}])
    function = {"name": "look", "parameters": {"properties": {"query": {"default": value}}}}
    with pytest.raises(ConfigError, match=r"'look' must be JSON"):
        Chat(messages, [{"type": "function", "function": function}])


def test_mappings_and_tuples_are_json():
    given = MappingProxyType({"query": ("a", None, 1.5)})
    call = {"function": {"name": "search", "arguments": given}}
    (found,) = Chat([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"]
    assert found["function"]["arguments"] == dict(given)


def test_a_template_without_tools_gets_them_in_the_system_message():
    tokenizer = tiny_tokenizer()
    assert "tools" not in tokenizer.chat_template
    call = {"function": {"name": "search", "arguments": {"query": "x"}}}
    messages = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Here."},
    ]
    text = render(Chat(messages, [TOOL]), tokenizer).text
    assert text.index("Searches the manual.") < text.index("Where?") < text.index("Here.")
    assert "<tool_call>" in text
    assert format_of(tokenizer).name == "hermes"


# ---- answers that are cut off, and answers of one call


@pytest.mark.parametrize(("name", "text", "calls"), WHOLE)
def test_a_cut_never_makes_another_call(name, text, calls):
    """A part of an answer has its first calls whole, and at most one that is cut off."""
    names = [each for each, _ in calls]
    for end in range(len(text) + 1):
        _, _, found = read(name, text[:end], 1000)
        named = [call for call in found if call.name]
        assert [call.name for call in named] == names[: len(named)]
        made = [call for call in named if isinstance(call, ToolCall)]
        assert plain(made) == calls[: len(made)]
        assert named[: len(made)] == made
        assert len(named) <= len(made) + 1
        assert all(call.text for call in named[len(made) :])


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "a', '{"query": "a'),
        ("llama3", '{"type": "function", "name": "search", "parameters": {"query"', '{"query"'),
        ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "a', '{"query": "a'),
        ("mistral", '[TOOL_CALLS]search[ARGS]{"query": ', '{"query":'),
        ("phi", '<|tool_call|>[{"name": "search", "arguments": {"que', '{"que'),
        ("gemma", "<start_function_call>call:search{query:<escape>a", '{"query":"a"'),
        ("gpt_oss", '<|channel|>commentary to=functions.search<|message|>{"que', '{"que'),
    ],
)
def test_a_call_that_is_cut_off_has_its_name(name, text, arguments):
    ((call,),) = read(name, text, 1000)[2:]
    assert (type(call), call.name, call.text) == (InvalidToolCall, "search", arguments)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "a"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "search", "arguments": {"query": "a"}}}</tool_call>'),
        ("mistral", '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "a"}}'),
    ],
)
def test_whole_arguments_are_a_call(name, text):
    assert plain(read(name, text, 1000)[2]) == [("search", {"query": "a"})]


@pytest.mark.parametrize("name", ["hermes", "mistral", "gemma", "gpt_oss"])
def test_depth_does_not_raise(name):
    text = next(text for form, text, _ in WHOLE if form == name)
    text = text.replace('"a {b}"', "[" * 100_000).replace("<escape>a {b}<escape>", "[" * 100_000)
    assert isinstance(read(name, text, 10**6)[2][0], InvalidToolCall)


@pytest.mark.parametrize(("name", "text", "calls"), WHOLE)
def test_the_end_of_the_first_call_is_seen(name, text, calls):
    """As soon as its arguments are whole, and not before."""
    reader = CallReader(FORMATS[name])
    for character in f"{text} ":
        reader.feed(character)
        if reader.has_call:
            break
    assert plain(reader.finish()[1]) == calls[:1]
