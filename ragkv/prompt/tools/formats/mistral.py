"""``[TOOL_CALLS][{"name": ..., "arguments": {...}}]`` or ``[TOOL_CALLS]name[ARGS]{...}``."""

import re

from ragkv.prompt.tools.calls import (
    MISSING,
    AnyCall,
    InvalidToolCall,
    ToolFormat,
    calls_in_list,
    named_call,
)

_MARK, _ARGS = "[TOOL_CALLS]", "[ARGS]"
_ID = re.compile(r"\[CALL_ID\].*", re.DOTALL)


def parse(text: str) -> tuple[str, list[AnyCall]]:
    """Read what follows the marks: a list, or a name and arguments for each mark."""
    content, *bodies = text.split(_MARK)
    calls = list[AnyCall]()
    for body in bodies:
        name, args, arguments = body.partition(_ARGS)
        name = _ID.sub("", name).strip()
        if args and not arguments.strip():
            calls.append(InvalidToolCall(body.strip(), MISSING, name))
        elif args:
            calls.append(named_call(name, arguments.strip()))
        else:
            calls += calls_in_list(body)
    return content, calls


FORMAT = ToolFormat(
    "mistral", lambda template: _MARK in template, (_MARK,), parse, (_ARGS, "[CALL_ID]")
)
