"""``{"name": ..., "parameters": {...}}`` as the whole answer: Llama 3.1 and later.

Several are separated by semicolons; ``<|python_tag|>`` may come before them.
"""

import json

from ragkv.prompt.tools.calls import AnyCall, ToolFormat, call_from, call_of

_TAG = "<|python_tag|>"


def parse(text: str) -> tuple[str, list[AnyCall]]:
    """Read JSON objects one after another, if the answer begins with one."""
    before, tag, body = text.partition(_TAG)
    rest = (body if tag else text).strip()
    if not rest.startswith("{"):
        return text.replace(_TAG, ""), []
    calls = list[AnyCall]()
    while rest:
        try:
            found, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            calls.append(call_of(rest))
            break
        if not tag and not calls and not _is_call(found):
            return text, []  # an answer that is JSON
        calls.append(call_from(found, rest[:end]))
        rest = rest[end:].lstrip("; \n\t")
    return (before if tag else ""), calls


def _is_call(found: object) -> bool:
    return (
        isinstance(found, dict) and "name" in found and bool({"parameters", "arguments"} & {*found})
    )


FORMAT = ToolFormat(
    "llama3",
    lambda template: _TAG in template or '"parameters": dictionary' in template,
    (_TAG, "{"),
    parse,
)
