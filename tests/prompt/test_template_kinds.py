"""Whatever a client's history has in it, every kind of chat template takes it."""

import copy
import json
from itertools import pairwise
from typing import Any

import pytest
from templates import KINDS, tokenizer_of

from ragkv.errors import ConfigError
from ragkv.prompt.chat import Chat
from ragkv.prompt.fitting import refusals_of
from ragkv.prompt.render import render, template_head

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks up a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calls(**cities: str) -> dict[str, Any]:
    """Return an answer that calls, as OpenAI's is: ids and cities."""
    made = [
        {"id": each, "type": "function", "function": {"name": "look", "arguments": json.dumps({"city": city})}}
        for each, city in cities.items()
    ]  # fmt: skip
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


HISTORIES = {
    "a question": [user("Q1")],
    "nothing but instructions": [system("S1"), system("S2")],
    "a chat": [system("S1"), user("Q1"), answer("A1"), user("Q2")],
    "one step": [user("Q1"), calls(call_abcdefghij="C1"), result("call_abcdefghij", "R1")],
    "two steps": [
        *(system("S1"), user("Q1"), calls(c1="C1"), result("c1", "R1")),
        *(calls(c2="C2"), result("c2", "R2"), answer("A1"), user("Q2")),
    ],
    "two results in a row": [
        *(user("Q1"), calls(call_1="C1", call_2="C2"), result("call_1", "R1")),
        *(result("call_2", "R2"), answer("A1"), user("Q2")),
    ],
    "results in another order": [
        *(user("Q1"), calls(a="C1", b="C2"), result("b", "R2"), result("a", "R1")),
    ],
    "a question after a result": [user("Q1"), calls(c="C1"), result("c", "R1"), user("Q2")],
    "two questions": [user("Q1"), user("Q2")],
    "two answers": [user("Q1"), answer("A1"), answer("A2"), user("Q2")],
    "an answer first": [answer("A1"), user("Q1"), answer("A2"), user("Q2")],
    "several system messages": [system("S1"), system("S2"), user("Q1")],
    "a later system message": [system("S1"), user("Q1"), answer("A1"), system("S2"), user("Q2")],
    "a system message last": [user("Q1"), answer("A1"), system("S1")],
    "a system message before an answer": [system("S1"), answer("A1"), user("Q1")],
    "the same id again": [
        *(user("Q1"), calls(x="C1"), result("x", "R1"), answer("A1")),
        *(user("Q2"), calls(x="C2"), result("x", "R2")),
    ],
}


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_was_said_is_in_the_prompt_in_order(kind, history, tools):
    messages = HISTORIES[history]
    text = render(Chat(messages, tools), tokenizer_of(kind)).text
    said = [each["content"] for each in messages if each["content"]]
    if tools:
        assert "Looks up a city." in text
        text = text.rpartition("Looks up a city.")[2] + text
    else:
        swapped = {"R2"} if history == "results in another order" else set()
        places = [text.index(each) for each in said if each not in swapped]
        assert places == sorted(places)
    said += [
        json.loads(call["function"]["arguments"])["city"]
        for each in messages
        for call in each.get("tool_calls", ())
    ]
    assert not [each for each in said if each not in text]
    assert "None" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_step_begins_with_the_earlier_one(kind):
    """Else no cache could be continued."""
    tokenizer, messages = tokenizer_of(kind), HISTORIES["two steps"]
    ends = [2, 4, 6, 8]
    texts = [render(Chat(messages[:end], [TOOL]), tokenizer).text for end in ends]
    for before, after in pairwise(texts):
        common = len(before.removesuffix("[assistant]"))
        for tail in ("<|im_start|>assistant\n", "<start_of_turn>model\n", "<|header|>assistant\n", "<|start|>assistant"):  # fmt: skip
            if before.endswith(tail):
                common = len(before) - len(tail)
        assert after.startswith(before[:common])


def test_what_the_kinds_refuse_is_found():
    found = {
        kind: {
            name
            for name in refusals_of(tokenizer_of(kind), tools=True).__dataclass_fields__
            if getattr(refusals_of(tokenizer_of(kind), tools=True), name)
        }
        for kind in KINDS
    }
    turns = {"repeats", "first_answers"}
    assert found == {
        "chatml": {"calls"},
        "qwen3": set(),
        "qwen3_coder": set(),
        "lfm2": {"texts_of_calls"},
        "mistral_small": {"ids", "systems", "questions_after_results", *turns},
        "mistral": {"ids", "systems", "system_alone", "questions_after_results", *turns},
        "gemma2": {"calls", "system", *turns},
        "gemma3": {"calls", "systems", "system_alone", *turns},
        "llama3": {"several_calls"},
        "functiongemma": set(),
        "gpt_oss": {"several_calls", "thoughts"},
        "alternating": {"several_calls", "system", "questions_after_results", *turns},
        "parts": {"calls", "texts"},
        "first_system": {"calls", "systems"},
    }


@pytest.mark.parametrize("kind", ["mistral", "functiongemma", "gpt_oss"])
def test_results_point_at_their_calls(kind):
    text = render(Chat(HISTORIES["results in another order"], [TOOL]), tokenizer_of(kind)).text
    if kind == "mistral":
        first, other = text.split('"id": "')[1:]
        assert f'R2, "call_id": "{other[:9]}"' in text
        assert f'R1, "call_id": "{first[:9]}"' in text
    else:
        assert text.count("response:look" if kind == "functiongemma" else "functions.look to=") == 2
    if kind == "gpt_oss":
        assert text.index("C1") < text.index("R1") < text.index("C2") < text.index("R2")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("kind", KINDS)
def test_thoughts_are_taken(kind, field):
    """Clients send back what a model thought before it called."""
    called = {**calls(c="C"), field: "Hm."}
    for text in ("A", None):
        history = [user("Q"), {**called, "content": text}, result("c", "R")]
        assert "R" in render(Chat(history, [TOOL]), tokenizer_of(kind)).text
    history = [user("Q"), {**answer("A"), field: "Hm."}, user("Q2")]
    assert "A" in render(history, tokenizer_of(kind)).text


def test_ids_that_fit_stay():
    history = [user("Q"), calls(a1B2c3D4e="C", toolu_01="D"), result("a1B2c3D4e", "R")]
    text = render(history, tokenizer_of("mistral")).text
    assert '"id": "a1B2c3D4e"' in text
    assert "toolu_01" not in text
    assert "toolu_01" not in render(history, tokenizer_of("chatml")).text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
def test_a_sink_is_the_prompts_head(kind, tools):
    tokenizer = tokenizer_of(kind)
    template = [system("Be brief."), user("About {context}")]
    head = template_head(template, tokenizer, tools)
    text = render(Chat([system("Be brief."), user("About it")], tools), tokenizer).text
    assert head.endswith("About ")
    assert text.startswith(head)


def test_what_no_form_helps_is_said_in_the_templates_words():
    with pytest.raises(ConfigError, match="a tool message without a call"):
        render([user("Q"), result("c", "R")], tokenizer_of("gpt_oss"))
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = "{{ messages[0].content.text.more }}"
    with pytest.raises(ConfigError, match="chat template"):
        render([user("Q")], tokenizer)
    tokenizer.chat_template = "{{ messages[0].content + 5 }}"
    with pytest.raises(ConfigError, match=r"chat template.*str"):
        render([user("Q")], tokenizer)
    tokenizer.chat_template = {"rag": KINDS["chatml"]}
    with pytest.raises(ConfigError, match=r"chat template.*no default"):
        render([user("Q")], tokenizer)


def test_a_template_for_tools_beside_another():
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = {"default": KINDS["gemma2"], "tool_use": KINDS["mistral"]}
    history = HISTORIES["two steps"]
    assert "[AVAILABLE_TOOLS]" in render(Chat(history, [TOOL]), tokenizer).text
    assert "<tool_call>" in render(history, tokenizer).text
