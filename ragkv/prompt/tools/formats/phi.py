"""``<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>``, ``functools[...]``: Phi-4."""

import re

from ragkv.prompt.tools.calls import AnyCall, ToolFormat, calls_in_list

_CALLS = re.compile(r"(?:<\|tool_call\|>|functools(?=\[))(.*?)(?:<\|/tool_call\|>|\Z)", re.DOTALL)


def parse(text: str) -> tuple[str, list[AnyCall]]:
    """Read the lists of calls."""
    calls = [call for body in _CALLS.findall(text) for call in calls_in_list(body)]
    return _CALLS.sub("", text), calls


FORMAT = ToolFormat(
    "phi",
    lambda template: "<|tool_call|>" in template or "<|tool|>" in template,
    ("<|tool_call|>", "functools["),
    parse,
    ("<|/tool_call|>",),
)
