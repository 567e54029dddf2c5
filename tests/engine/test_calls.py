"""Tool calls of an engine's answers: one at most where the prompt says so, and calls cut off."""

import copy
import json

import pytest
from tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

from ragkv import Chat, RagKV
from ragkv.errors import ConfigError
from ragkv.prompt.tools.calls import InvalidToolCall, ToolCall

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}},
    },
}
LOOK = {"type": "function", "function": {"name": "look"}}
ASKED = [{"role": "user", "content": "Where?"}]
HERMES = '<tool_call>{"name": "search", "arguments": {"page": 5}}</tool_call>'
LLAMA = '{"name": "search", "parameters": {"page": 5}}'
GEMMA = "<start_function_call>call:search{page:5}<end_function_call>"
HARMONY = '<|channel|>commentary to=functions.search<|message|>{"page": 5}<|call|>'
MARKS = {
    "hermes": "<tool_call>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "gemma": "<start_function_call>",
    "gpt_oss": "to=functions.",
}
TWICE = [
    ("hermes", f"I look.\n{HERMES}\n{HERMES}\nDone.", "I look."),
    ("llama3", f"{LLAMA}; {LLAMA}", ""),
    ("llama3", f"I look.<|python_tag|>{LLAMA}; {LLAMA}", "I look."),
    (
        "mistral",
        'I look.[TOOL_CALLS] [{"name": "search", "arguments": {"page": 5}}, {"name": "look"}]',
        "I look.",
    ),
    ("mistral", '[TOOL_CALLS]search[ARGS]{"page": 5}[TOOL_CALLS]look[ARGS]{}', ""),
    ("gemma", f"I look.{GEMMA}{GEMMA}", "I look."),
    (
        "gpt_oss",
        (
            "<|channel|>analysis<|message|>Hm.<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.search<|message|>{"page": 5}<|call|>'
            '<|start|>assistant<|channel|>commentary to=functions.look<|message|>{"page": 6}<|call|>'
        ),
        "",
    ),
]


@pytest.fixture
def make_kv():
    """Return ``make(format)``: an engine whose chat template writes calls so."""
    engines = []

    def make(
        name: str = "hermes", special: tuple[str, ...] = (), added: tuple[str, ...] = ()
    ) -> RagKV:
        tokenizer, model = copy.deepcopy(tiny_tokenizer()), tiny_model(layers=1)
        tokenizer.chat_template = f"{CHAT_TEMPLATE}{{# tools {MARKS[name]} #}}"
        if special or added:
            tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
            tokenizer.add_tokens(list(added))
            model.resize_token_embeddings(len(tokenizer))
        engines.append(RagKV(model, tokenizer, store=":memory:"))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def finished(kv, prompt, streaming, **settings):
    """Return an answer; a stream's pieces are its text."""
    if not streaming:
        return kv.generate(prompt, **settings)
    with kv.stream(prompt, **settings) as stream:
        text = "".join(stream)
    assert text == stream.completion.text
    return stream.completion


@pytest.mark.parametrize(
    ("name", "said", "text", "streaming"),
    [(*each, bool(at % 2)) for at, each in enumerate([*TWICE, TWICE[0]])],
)
def test_one_call_at_most(make_kv, make_say, name, said, text, streaming):
    """Generation ends behind the first, so that no token is computed for the others."""
    kv = make_kv(name)
    make_say(kv, said)
    both, one = (
        finished(
            kv,
            Chat(ASKED, [SEARCH, LOOK], parallel_tool_calls=parallel),
            streaming,
            max_new_tokens=300,
        )
        for parallel in (True, False)
    )
    assert len(both.tool_calls) == 2
    (call,) = one.tool_calls
    assert (call.name, dict(call.arguments), one.text) == ("search", {"page": 5}, text)
    assert one.invalid_tool_calls == ()
    assert (one.finish_reason, one.openai_finish_reason) == ("stop", "tool_calls")
    assert one.report.decode.tokens == len(one.token_ids) < len(both.token_ids)


def test_an_answer_without_a_call_goes_on(make_kv, make_say):
    kv, text = make_kv(), 'It is {"a": 1}: see }} <tool_call'
    make_say(kv, text)
    assert kv.generate(Chat(ASKED, [SEARCH], parallel_tool_calls=False)).text == text
    make_say(kv, HERMES)
    answer = kv.generate(Chat(ASKED, [SEARCH], "none", parallel_tool_calls=False))
    assert (answer.text, answer.tool_calls) == (HERMES, ())


def test_a_broken_call_is_the_one_too(make_kv, make_say):
    """What follows it is no second call to be made."""
    kv = make_kv()
    broken = HERMES.replace("5", "five")
    make_say(kv, broken + HERMES)
    answer = kv.generate(Chat(ASKED, [SEARCH], parallel_tool_calls=False), max_new_tokens=300)
    assert answer.tool_calls == ()
    assert [call.name for call in answer.invalid_tool_calls] == ["search"]


def test_parallel_calls_are_a_boolean():
    with pytest.raises(ConfigError, match="parallel_tool_calls must be True or False"):
        Chat(ASKED, [SEARCH], parallel_tool_calls="no")


@pytest.mark.parametrize(("choice", "streaming"), [("any", False), ("search", True)])
def test_a_forced_call_that_is_cut_off(make_kv, make_say, choice, streaming):
    """It has its name and begun arguments, or it is text."""
    kv, said = make_kv(), '{"name": "search", "arguments": {"page": 5}}'
    make_say(kv, said)
    kinds = set()
    whole = len(kv.tokenizer(said)["input_ids"])
    for tokens in (*range(1, whole, 4), whole):
        chat = Chat(ASKED, [SEARCH], choice)
        answer = finished(kv, chat, streaming, max_new_tokens=tokens)
        calls = [*answer.tool_calls, *answer.invalid_tool_calls]
        kinds.add(tuple(map(type, calls)))
        assert bool(answer.text) == (not calls)
        assert said.startswith(answer.text)
        for call in calls:
            assert call.name == "search"
            if isinstance(call, InvalidToolCall):
                assert '{"page": 5}'.startswith(call.text)
                assert call.text
                assert answer.openai_finish_reason == "length"
    assert kinds == {(), (InvalidToolCall,), (ToolCall,)}
    assert (answer.finish_reason, answer.openai_finish_reason) == ("stop", "tool_calls")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "said", "text"),
    [
        ("hermes", "I look.<tool_call>search</tool_call>", "I look.\nsearch"),
        ("hermes", '<tool_call>{"name": "sear', '{"name": "sear'),
        ("mistral", "I look.[TOOL_CALLS]sear", "I look.\nsear"),
        ("llama3", '{"answer": "It is', '{"answer": "It is'),
        ("gemma", "<start_function_call>call:sear", "call:sear"),
    ],
)
def test_a_call_without_a_name_is_text(make_kv, make_say, name, said, text, streaming):
    kv = make_kv(name)
    make_say(kv, said)
    answer = finished(kv, Chat(ASKED, [SEARCH]), streaming, max_new_tokens=300)
    assert (answer.text, answer.tool_calls, answer.invalid_tool_calls) == (text, (), ())


def test_a_call_without_arguments_is_text_where_it_was_cut_off(make_kv, make_say):
    """The model that ends there itself has made a call, a wrong one."""
    kv = make_kv()
    said = HERMES[: HERMES.index("uments")]
    make_say(kv, said)
    (call,) = kv.generate(Chat(ASKED, [SEARCH])).invalid_tool_calls
    assert (call.name, call.text) == ("search", said.removeprefix("<tool_call>"))
    tokens = len(kv.tokenizer(said)["input_ids"])
    answer = kv.generate(Chat(ASKED, [SEARCH]), max_new_tokens=tokens)
    assert (answer.text, answer.invalid_tool_calls) == (call.text, ())
    assert answer.openai_finish_reason == "length"


def test_a_second_call_that_is_cut_off(make_kv, make_say):
    kv = make_kv()
    make_say(kv, HERMES + HERMES)
    whole = len(kv.tokenizer(HERMES)["input_ids"])
    answer = kv.generate(Chat(ASKED, [SEARCH]), max_new_tokens=2 * whole - 14)
    assert [call.name for call in answer.tool_calls] == ["search"]
    assert [call.name for call in answer.invalid_tool_calls] == ["search"]
    assert answer.openai_finish_reason == "length"


# ---- tools beside a schema of answers

PLACE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "floor": {"enum": [1, 2]}},
    "required": ["name", "floor"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, said) for name, said, text in TWICE if not text and name != "llama3"),
        ("hermes", f"{HERMES}\n{HERMES}"),
        ("gemma", GEMMA + GEMMA),
        ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}"),
    ],
)
def test_a_call_in_place_of_an_answer_by_a_schema(make_kv, make_say, name, said, streaming):
    kv = make_kv(name)
    make_say(kv, said.removeprefix("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"))
    answer = finished(
        kv, Chat(ASKED, [SEARCH, LOOK]), streaming, json_schema=PLACE, max_new_tokens=300
    )
    assert [call.name for call in answer.tool_calls][:1] == ["search"]
    assert len(answer.tool_calls) == 2
    assert answer.text == ""


def test_a_call_of_llama_in_place_of_an_answer(make_kv, make_say):
    """It is JSON as the answer would be, and so is told by its members."""
    kv, chat = make_kv("llama3"), Chat(ASKED, [SEARCH, LOOK])
    make_say(kv, LLAMA.replace("parameters", "arguments"))
    (call,) = kv.generate(chat, json_schema=PLACE, max_new_tokens=60).tool_calls
    assert (call.name, call.arguments) == ("search", {"page": 5})
    make_say(kv, '{"name": "loo", "floor": 2}')
    answer = kv.generate(chat, json_schema=PLACE, max_new_tokens=60)
    assert (json.loads(answer.text), answer.tool_calls) == ({"name": "loo", "floor": 2}, ())
    form = {"$ref": "#/$defs/P", "$defs": {"P": PLACE}}
    assert kv.generate(chat, json_schema=form, max_new_tokens=60).text


@pytest.mark.parametrize(
    ("name", "choice"), [*((name, "auto") for name in sorted(MARKS)), ("hermes", "none")]
)
@pytest.mark.parametrize("said", ["It is upstairs.", ""])
def test_an_answer_by_a_schema_beside_tools(make_kv, make_say, name, said, choice):
    """Where the model makes no call."""
    kv = make_kv(name)
    make_say(kv, said)
    chat = Chat(ASKED, [SEARCH], choice)
    answer = kv.generate(chat, json_schema=PLACE, max_new_tokens=60)
    assert answer.finish_reason == "stop"
    assert json.loads(answer.text).keys() == {"name", "floor"}
    assert (answer.tool_calls, answer.invalid_tool_calls) == ((), ())


@pytest.mark.parametrize(
    ("name", "said", "begin"),
    [
        ("hermes", "<start", "<tool_call>"),
        ("mistral", "[1, 2", "[TOOL_CALLS]"),
        ("gemma", "<tool_call>", "<start_function_call>"),
    ],
)
def test_a_call_that_has_begun_goes_on(make_kv, make_say, name, said, begin):
    """No other text has its first characters."""
    kv = make_kv(name)
    make_say(kv, said)
    chat = Chat(ASKED, [SEARCH])
    answer = kv.generate(chat, json_schema=PLACE, max_new_tokens=60)
    assert kv.tokenizer.decode(answer.token_ids).startswith(begin)


@pytest.mark.parametrize(
    ("name", "special", "said"),
    [
        ("hermes", ("<tool_call>", "</tool_call>"), f"{HERMES}\n{HERMES}"),
        ("llama3", ("<|python_tag|>",), f"<|python_tag|>{LLAMA}; {LLAMA}"),
        ("mistral", ("[TOOL_CALLS]", "[ARGS]"), TWICE[4][1]),
        ("gemma", ("<start_function_call>", "<end_function_call>", "<escape>"), GEMMA + GEMMA),
        ("gpt_oss", ("<|channel|>", "<|start|>", "<|message|>", "<|call|>"), HARMONY + HARMONY),
    ],
)
def test_marks_that_are_special_tokens(make_kv, make_say, name, special, said):
    kv = make_kv(name, special)
    make_say(kv, said)
    for schema in (None, PLACE):
        one, both = (
            kv.generate(
                Chat(ASKED, [SEARCH, LOOK], parallel_tool_calls=parallel),
                json_schema=schema,
                max_new_tokens=300,
            )
            for parallel in (False, True)
        )
        assert [dict(call.arguments) for call in one.tool_calls] == [{"page": 5}]
        assert len(both.tool_calls) == 2
        assert one.text == both.text == ""
    make_say(kv, "It is upstairs.")
    answer = kv.generate(Chat(ASKED, [SEARCH]), json_schema=PLACE, max_new_tokens=60)
    assert json.loads(answer.text).keys() == {"name", "floor"}


def test_one_token_may_go_beyond_the_mark(make_kv, make_say):
    kv = make_kv(added=(HERMES,))
    make_say(kv, HERMES)
    answer = kv.generate(Chat(ASKED, [SEARCH]), json_schema=PLACE)
    assert [call.name for call in answer.tool_calls] == ["search"]
    assert len(answer.token_ids) == 2
