"""Tools in prompts of models whose chat template does not take any."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_DEFINITIONS = """\
These tools can be called, one JSON schema a line:
<tools>
{tools}
</tools>
To call one, answer with nothing but its name and arguments:
<tool_call>
{{"name": "the tool's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def shown(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as the model sees them: without ``strict``, which is said to the decoder."""
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
    told = _DEFINITIONS.format(tools=lines)
    first, *rest = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{told}"}, *rest]
    return [{"role": "system", "content": told}, *messages]


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
