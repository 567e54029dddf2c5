"""``<start_function_call>call:name{key:value}<end_function_call>``: FunctionGemma.

Strings stand between ``<escape>`` marks, everything else as in JSON but for unquoted names.
"""

import json
import re

from ragkv.prompt.tools.calls import AnyCall, InvalidToolCall, ToolFormat, named_call

_CALL = re.compile(
    r"<start_function_call>(.*?)(?:<end_function_call>|(?=<start_function_call>)|\Z)", re.DOTALL
)
_NAMED = re.compile(r"\s*call:\s*([^\s{]+)\s*(\{.*)", re.DOTALL)
_ESCAPE = "<escape>"
_KEY = re.compile(r"([{,]\s*)([A-Za-z_]\w*)\s*:")


def parse(text: str) -> tuple[str, list[AnyCall]]:
    """Read every pair of marks."""
    calls = [_call(body) for body in _CALL.findall(text)]
    return _CALL.sub("", text), calls


def _call(body: str) -> AnyCall:
    found = _NAMED.match(body)
    if found is None:
        return InvalidToolCall(body.strip(), "it is not call:name{...}")
    name, arguments = found.groups()
    parts = arguments.split(_ESCAPE)  # every other one is a string
    written = "".join(
        json.dumps(part) if index % 2 else _KEY.sub(r'\1"\2":', part)
        for index, part in enumerate(parts)
    )
    return named_call(name, written.strip())


FORMAT = ToolFormat(
    "gemma",
    lambda template: "<start_function_call>" in template,
    ("<start_function_call>",),
    parse,
    ("<end_function_call>", _ESCAPE),
)
