"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Qwen, Hermes and many others."""

import re

from ragkv.prompt.tools.calls import AnyCall, ToolFormat, call_of

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def parse(text: str) -> tuple[str, list[AnyCall]]:
    """Read every pair of marks; the last one may be cut off."""
    calls = [call_of(body) for body in _CALL.findall(text)]
    return _CALL.sub("", text), calls


FORMAT = ToolFormat(
    "hermes", lambda template: "<tool_call>" in template, ("<tool_call>",), parse, ("</tool_call>",)
)
