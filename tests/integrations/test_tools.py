"""Tools of both frameworks' models: who decides, how many calls, and which."""

import pytest

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
FORCED = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
ADDED = ("add", {"a": 1, "b": 2})


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def count(down: bool) -> str:
    """Count up or down."""
    return f"{down}"


@pytest.fixture(params=[False, True])
def streaming(request) -> bool:
    return request.param


@pytest.mark.parametrize(("parallel", "times"), [({}, 2), (True, 2), (False, 1)])
def test_one_call_at_most(framework, model, kv, make_say, parallel, times, streaming):
    given = {} if parallel == {} else {"parallel_tool_calls": parallel}
    make_say(kv, f"Look:\n{CALL}{CALL}")
    answer = framework.calls(model(120), [add], streaming=streaming, **given)
    assert answer == ("Look:", [ADDED] * times)


@pytest.mark.parametrize("choice", ["required", "count"])
def test_a_call_that_has_to_be_made(framework, model, choice, streaming):
    text, calls = framework.calls(model(400), [count], streaming=streaming, tool_choice=choice)
    assert (text, calls) in [("", [("count", {"down": down})]) for down in (True, False)]


CHOICES = [
    *("any", "required", True, "add", {"type": "tool", "name": "add"}, {"type": "any"}),
    {"type": "function", "function": {"name": "add"}},
    {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "add"}}],
        },
    },
]


@pytest.mark.parametrize("place", ["here"], indirect=True)  # a server's: tests/serve/test_tools.py
@pytest.mark.parametrize("choice", CHOICES)
def test_choices_of_a_call(framework, model, kv, make_say, choice):
    make_say(kv, FORCED)
    asked = {"streaming": False, "tool_choice": choice}
    assert framework.calls(model(120), [add, count], **asked) == ("", [ADDED])


@pytest.mark.parametrize("place", ["here"], indirect=True)
@pytest.mark.parametrize("choice", [None, False, "auto", "none", {"type": "auto"}])
def test_choices_that_leave_it_to_the_model(framework, model, kv, make_say, choice):
    make_say(kv, "It is 3.")
    asked = {"streaming": False, "tool_choice": choice}
    assert framework.calls(model(120), [add], **asked) == ("It is 3.", [])
