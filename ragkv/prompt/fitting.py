"""Chat messages rewritten for what a chat template accepts.

Short chats are rendered with each template once to find what it refuses. The result does not depend
on the chat, so its first messages render the same whatever follows, and earlier prompts are reused.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ragkv.prompt.messages import parts_of, short_id
from ragkv.prompt.tools.calls import ID_CHARS

Messages = list[dict[str, Any]]
TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError),
    RecursionError,
)
"""Errors of chat templates for messages that they do not accept."""


@dataclass(frozen=True, slots=True)
class Refusals:
    """Features that a chat template refuses or leaves out.

    Attributes
    ----------
    texts
        Content that is a text; only lists of parts are accepted.
    system, systems
        System messages; more than one of them, or one that is not the first.
    system_alone
        A chat of nothing but system messages.
    repeats
        Two messages of the same role in a row.
    first_answers
        A chat that begins with an answer.
    calls
        Tool calls and their results.
    several_calls
        More than one call in a message.
    texts_of_calls
        Calls only: results are written without the calls.
    ids
        Ids of calls that are not nine letters and digits.
    questions_after_results
        A user's message right after a tool's result.
    thoughts
        A model's thoughts beside a text and a call.
    """

    texts: bool = False
    system: bool = False
    systems: bool = False
    system_alone: bool = False
    repeats: bool = False
    first_answers: bool = False
    calls: bool = False
    several_calls: bool = False
    texts_of_calls: bool = False
    ids: bool = False
    questions_after_results: bool = False
    thoughts: bool = False


_KNOWN: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[str, bool], Refusals]] = (
    WeakKeyDictionary()
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "A text."}},
            "required": ["text"],
        },
    },
}


def fitted(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, *, tools: bool
) -> Messages:
    """Return messages that the chat template accepts, as far as possible.

    Parameters
    ----------
    messages
        As :func:`ragkv.prompt.messages.normal_messages` returns them.
    tools
        Whether definitions of tools are given to the template.
    """
    refused = refusals_of(tokenizer, tools=tools)
    out = [dict(message) for message in messages]
    if refused.calls or refused.texts_of_calls:
        out = as_text(out, results=refused.calls)
    if refused.thoughts:
        out = list(map(_without_thoughts, out))
    if refused.several_calls:
        out = list(_one_by_one(out))
    if refused.ids:
        out = list(map(_with_short_ids, out))
    if refused.questions_after_results:
        out = list(_answered(out))
    if out and refused.system_alone and all(each["role"] == "system" for each in out):
        out[-1] = {**out[-1], "role": "user"}
    out = _in_taken_roles(out, refused)
    if refused.first_answers:
        at = 1 if out and out[0]["role"] == "system" else 0
        if [each["role"] for each in out[at : at + 1]] == ["assistant"]:
            out.insert(at, {"role": "user", "content": ""})
    return list(parts_of(out)) if refused.texts else out


def refusals_of(tokenizer: PreTrainedTokenizerBase, *, tools: bool) -> Refusals:
    """Return what the tokenizer's chat template refuses, with or without definitions of tools."""
    definitions: list[Any] | None = [_TOOL] if tools else None
    template = tokenizer.get_chat_template(tools=definitions)
    known = _KNOWN.setdefault(tokenizer, {})
    if (template, tools) not in known:

        def render(messages: Messages) -> str:
            return str(
                tokenizer.apply_chat_template(
                    messages, tools=definitions, tokenize=False, add_generation_prompt=True
                )
            )

        reads_calls = "tools" in template or (not tools and "tool_calls" in template)
        known[template, tools] = _probed(render, reads_calls=reads_calls)
    return known[template, tools]


@dataclass(frozen=True, slots=True)
class _Probe:
    """Renders short chats; their texts must be in the output."""

    render: Callable[[Messages], str]
    in_parts: bool = False

    def takes(self, *messages: dict[str, Any]) -> bool:
        try:
            text = self.render(list(parts_of(messages) if self.in_parts else messages))
        except TEMPLATE_ERRORS:
            return False
        return all(mark in text for message in messages for mark in _marks(message))


def _marks(message: Mapping[str, Any]) -> Iterator[str]:
    yield message["content"]
    for call in message.get("tool_calls", ()):
        yield from call["function"]["arguments"].values()


def _says(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def _calls(**arguments_by_id: dict[str, str]) -> dict[str, Any]:
    made = [
        {"type": "function", "id": each, "function": {"name": "probe", "arguments": arguments}}
        for each, arguments in arguments_by_id.items()
    ]
    return _says("assistant", "", tool_calls=made)


def _result(call_id: str, text: str) -> dict[str, Any]:
    return _says("tool", text, tool_call_id=call_id, name="probe")


_SYSTEM, _SYSTEM_2 = _says("system", "ragkvS1"), _says("system", "ragkvS2")
_USER, _USER_2, _NO_USER = (_says("user", text) for text in ("ragkvU1", "ragkvU2", ""))
_ANSWER, _ANSWER_2, _NO_ANSWER = (_says("assistant", text) for text in ("ragkvA1", "ragkvA2", ""))
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_NINE, _OTHER = "a1b2c3d4e", "f5a6b7c8d"
_ANY = ("call_0123456789", "c1")
"""Ids in the forms that clients use."""


def _probed(render: Callable[[Messages], str], *, reads_calls: bool) -> Refusals:
    probe = _Probe(render)
    if not probe.takes(_USER):
        probe = _Probe(render, in_parts=True)
        if not probe.takes(_USER):
            return Refusals(calls=not reads_calls)
    takes = probe.takes
    talks, system = takes(_USER, _ANSWER, _USER_2), takes(_SYSTEM, _USER)
    systems = takes(_SYSTEM, _SYSTEM_2, _USER) and takes(
        *(_SYSTEM, _USER, _ANSWER, _SYSTEM_2, _USER_2)
    )
    repeats = takes(_USER, _USER_2) and takes(_USER, _ANSWER, _ANSWER_2, _USER_2)
    return Refusals(
        texts=probe.in_parts,
        system=not system,
        systems=talks and system and not systems,
        system_alone=system and not takes(_SYSTEM),
        repeats=talks and not repeats,
        first_answers=takes(_NO_USER, _ANSWER, _USER) and not takes(_ANSWER, _USER),
        **(_probed_calls(takes) if reads_calls else {"calls": True}),
    )


def _probed_calls(takes: Callable[..., bool]) -> dict[str, bool]:
    def takes_call(call_id: str, *more: dict[str, Any], **arguments: str) -> bool:
        return takes(_USER, _calls(**{call_id: arguments}), _result(call_id, "ragkvR1"), *more)

    if not takes_call(_NINE):
        return {"calls": True}
    one, other = {"text": "ragkvC1"}, {"text": "ragkvC2"}
    results = _result(_NINE, "ragkvR1"), _result(_OTHER, "ragkvR2")
    apart = _calls(**{_NINE: one}), results[0], _calls(**{_OTHER: other}), results[1]
    together = _calls(**{_NINE: one, _OTHER: other}), *results
    said = {**_calls(**{_NINE: one}), "content": "ragkvA1"}
    return {
        "ids": not all(map(takes_call, _ANY)),
        "texts_of_calls": not takes_call(_NINE, **one),
        "several_calls": takes(_USER, *apart) and not takes(_USER, *together),
        "questions_after_results": takes_call(_NINE, _NO_ANSWER, _USER_2)
        and not takes_call(_NINE, _USER_2),
        "thoughts": takes(_USER, said, results[0])
        and not takes(_USER, {**said, "reasoning_content": "Hm."}, results[0]),
    }


def _one_by_one(messages: Messages) -> Iterator[dict[str, Any]]:
    """Yield each call in a message of its own, with its result behind it."""
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results: Messages = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        for call in calls:
            yield {**message, "tool_calls": [call]}
            message = {"role": message["role"], "content": ""}
            own = next((each for each in results if each.get("tool_call_id") == call["id"]), None)
            if own is not None:
                yield own
                results = [each for each in results if each is not own]
        yield from results


def _without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    if not message["content"] or "tool_calls" not in message:
        return message
    return {name: value for name, value in message.items() if name not in _THOUGHTS}


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    out = dict(message)
    if "tool_calls" in message:
        calls = message["tool_calls"]
        out["tool_calls"] = [{**call, "id": _short(call["id"])} for call in calls]
    if message.get("tool_call_id"):
        out["tool_call_id"] = _short(message["tool_call_id"])
    return out


def _short(call_id: str) -> str:
    fits = len(call_id) == ID_CHARS and call_id.isascii() and call_id.isalnum()
    return call_id if fits else short_id(call_id)


def _answered(messages: Messages) -> Iterator[dict[str, Any]]:
    """Yield an empty answer between a result and a question."""
    before = ""
    for message in messages:
        if message["role"] == "user" and before == "tool":
            yield {"role": "assistant", "content": ""}
        before = message["role"]
        yield message


def _in_taken_roles(messages: Messages, refused: Refusals) -> Messages:
    """Return messages in roles and in an order that the template accepts.

    A refused system message becomes the beginning of the next user message.
    """
    out: Messages = []
    carries_system = False  # whether the last one is a system message in the user's role
    for given in messages:
        last = out[-1] if out else {"role": ""}
        system = given["role"] == "system"
        leads = all(each["role"] == "system" for each in out)
        moved = system and (refused.system or (refused.systems and not leads))
        message = {**given, "role": "user"} if moved else given
        alike = last["role"] == message["role"] != "tool" and not (
            "tool_calls" in last or "tool_calls" in message
        )
        if alike and (refused.repeats or carries_system or (system and refused.systems)):
            texts = (last["content"], message["content"])
            out[-1] = {**last, "content": "\n\n".join(text for text in texts if text)}
            carries_system = carries_system and moved
        else:
            out.append(message)
            carries_system = moved
    return out


_DEFINITIONS = """\
These tools can be called, one JSON schema a line:
<tools>
{tools}
</tools>
To call one, answer with nothing but its name and arguments:
<tool_call>
{{"name": "the tool's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def shown_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as the model sees them: without ``strict``, which only the decoder reads."""
    return [
        {**tool, "function": {k: v for k, v in tool["function"].items() if k != "strict"}}
        for tool in tools
    ]


def with_definitions(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return messages that describe the tools.

    The definitions stand behind the system message's text, or in one of their own.
    """
    lines = "\n".join(json.dumps(tool["function"]) for tool in tools)
    definitions = _DEFINITIONS.format(tools=lines)
    first, *rest = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{definitions}"}, *rest]
    return [{"role": "system", "content": definitions}, *messages]


def as_text(messages: Iterable[Mapping[str, Any]], *, results: bool) -> list[dict[str, Any]]:
    """Return messages with calls written into their text, and maybe results as the user's."""
    return [_as_text(message, results=results) for message in messages]


def _as_text(message: Mapping[str, Any], *, results: bool) -> dict[str, Any]:
    if message["role"] == "tool" and results:
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    if "tool_calls" not in message:
        return dict(message)
    calls = (_call(call["function"]) for call in message["tool_calls"])
    content = "\n".join(part for part in (message["content"], *calls) if part)
    return {"role": message["role"], "content": content}


def _call(function: Mapping[str, Any]) -> str:
    written = json.dumps({"name": function["name"], "arguments": function["arguments"]})
    return f"<tool_call>\n{written}\n</tool_call>"
