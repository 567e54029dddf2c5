"""The formats in which chat templates write tool calls.

| format | written as |
|---|---|
| gpt_oss (harmony) | ``<|channel|>commentary to=functions.NAME ...<|message|>{...}<|call|>`` |
| gemma (FunctionGemma) | ``<start_function_call>call:name{key:value}<end_function_call>`` |
| hermes (Qwen and many others) | ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` |
| llama3 | ``{"name": ..., "parameters": {...}}`` as the whole answer |
| mistral | ``[TOOL_CALLS][{"name": ...}]`` or ``[TOOL_CALLS]name[ARGS]{...}`` |
| phi | ``<|tool_call|>[{"name": ...}]<|/tool_call|>`` or ``functools[...]`` |
"""

from __future__ import annotations

import json
import re

from ragkv.prompt.tools.calls import (
    MISSING,
    AnyCall,
    InvalidToolCall,
    ToolFormat,
    call_from,
    call_of,
    calls_in_list,
    named_call,
)

# ---- gpt_oss

_GPT_OSS_MESSAGE = re.compile(
    r"(?:<\|start\|>\s*assistant)?(?P<head>[^<]*<\|channel\|>.*?)<\|message\|>"
    r"(?P<body>.*?)(?P<end><\|call\|>|<\|end\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_GPT_OSS_TO = re.compile(r"to=functions\.([^\s<]+)")


def _parse_gpt_oss(text: str) -> tuple[str, list[AnyCall]]:
    """Read the messages: the final channel's are the text, those to a function are calls.

    What the model thinks aloud, in the other channels, is dropped.
    """
    messages = list(_GPT_OSS_MESSAGE.finditer(text))
    if not messages:
        return text, []
    calls, content = list[AnyCall](), list[str]()
    for message in messages:
        called = _GPT_OSS_TO.search(message["head"])
        body = message["body"].strip()
        if called is not None and not body and not message["end"]:
            calls.append(InvalidToolCall(message[0], MISSING, called[1]))
        elif called is not None:
            calls.append(named_call(called[1], body))
        elif "final" in message["head"]:
            content.append(message["body"])
    return "".join(content), calls


# ---- gemma

_GEMMA_CALL = re.compile(
    r"<start_function_call>(.*?)(?:<end_function_call>|(?=<start_function_call>)|\Z)", re.DOTALL
)
_GEMMA_NAMED = re.compile(r"\s*call:\s*([^\s{]+)\s*(\{.*)", re.DOTALL)
_GEMMA_ESCAPE = "<escape>"
_GEMMA_KEY = re.compile(r"([{,]\s*)([A-Za-z_]\w*)\s*:")


def _parse_gemma(text: str) -> tuple[str, list[AnyCall]]:
    """Read every pair of marks."""
    calls = [_gemma_call(body) for body in _GEMMA_CALL.findall(text)]
    return _GEMMA_CALL.sub("", text), calls


def _gemma_call(body: str) -> AnyCall:
    found = _GEMMA_NAMED.match(body)
    if found is None:
        return InvalidToolCall(body.strip(), "it is not call:name{...}")
    name, arguments = found.groups()
    parts = arguments.split(_GEMMA_ESCAPE)  # every other one is a string
    written = "".join(
        json.dumps(part) if index % 2 else _GEMMA_KEY.sub(r'\1"\2":', part)
        for index, part in enumerate(parts)
    )
    return named_call(name, written.strip())


# ---- hermes

_HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def _parse_hermes(text: str) -> tuple[str, list[AnyCall]]:
    """Read every pair of marks; the last one may be cut off."""
    calls = [call_of(body) for body in _HERMES_CALL.findall(text)]
    return _HERMES_CALL.sub("", text), calls


# ---- llama3

_LLAMA3_TAG = "<|python_tag|>"


def _parse_llama3(text: str) -> tuple[str, list[AnyCall]]:
    """Read JSON objects one after another, if the answer begins with one."""
    before, tag, body = text.partition(_LLAMA3_TAG)
    rest = (body if tag else text).strip()
    if not rest.startswith("{"):
        return text.replace(_LLAMA3_TAG, ""), []
    calls = list[AnyCall]()
    while rest:
        try:
            found, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            calls.append(call_of(rest))
            break
        if not tag and not calls and not _llama3_is_call(found):
            return text, []  # an answer that is JSON
        calls.append(call_from(found, rest[:end]))
        rest = rest[end:].lstrip("; \n\t")
    return (before if tag else ""), calls


def _llama3_is_call(found: object) -> bool:
    return (
        isinstance(found, dict) and "name" in found and bool({"parameters", "arguments"} & {*found})
    )


# ---- mistral

_MISTRAL_MARK, _MISTRAL_ARGS = "[TOOL_CALLS]", "[ARGS]"
_MISTRAL_ID = re.compile(r"\[CALL_ID\].*", re.DOTALL)


def _parse_mistral(text: str) -> tuple[str, list[AnyCall]]:
    """Read what follows the marks: a list, or a name and arguments for each mark."""
    content, *bodies = text.split(_MISTRAL_MARK)
    calls = list[AnyCall]()
    for body in bodies:
        name, args, arguments = body.partition(_MISTRAL_ARGS)
        name = _MISTRAL_ID.sub("", name).strip()
        if args and not arguments.strip():
            calls.append(InvalidToolCall(body.strip(), MISSING, name))
        elif args:
            calls.append(named_call(name, arguments.strip()))
        else:
            calls += calls_in_list(body)
    return content, calls


# ---- phi

_PHI_CALLS = re.compile(
    r"(?:<\|tool_call\|>|functools(?=\[))(.*?)(?:<\|/tool_call\|>|\Z)", re.DOTALL
)


def _parse_phi(text: str) -> tuple[str, list[AnyCall]]:
    """Read the lists of calls."""
    calls = [call for body in _PHI_CALLS.findall(text) for call in calls_in_list(body)]
    return _PHI_CALLS.sub("", text), calls


FORMATS = (
    ToolFormat(
        "gpt_oss",
        lambda template: "to=functions." in template,
        ("<|channel|>", "<|start|>"),
        _parse_gpt_oss,
        ("<|message|>", "<|call|>", "<|end|>", "<|return|>", "<|constrain|>"),
        openings=("<|channel|>commentary to=functions.",),
    ),
    ToolFormat(
        "gemma",
        lambda template: "<start_function_call>" in template,
        ("<start_function_call>",),
        _parse_gemma,
        ("<end_function_call>", _GEMMA_ESCAPE),
    ),
    ToolFormat(
        "hermes",
        lambda template: "<tool_call>" in template,
        ("<tool_call>",),
        _parse_hermes,
        ("</tool_call>",),
    ),
    ToolFormat(
        "llama3",
        lambda template: _LLAMA3_TAG in template or '"parameters": dictionary' in template,
        (_LLAMA3_TAG, "{"),
        _parse_llama3,
    ),
    ToolFormat(
        "mistral",
        lambda template: _MISTRAL_MARK in template,
        (_MISTRAL_MARK,),
        _parse_mistral,
        (_MISTRAL_ARGS, "[CALL_ID]"),
    ),
    ToolFormat(
        "phi",
        lambda template: "<|tool_call|>" in template or "<|tool|>" in template,
        ("<|tool_call|>", "functools["),
        _parse_phi,
        ("<|/tool_call|>",),
    ),
)
"""All formats; the first that suits a chat template is its own."""
