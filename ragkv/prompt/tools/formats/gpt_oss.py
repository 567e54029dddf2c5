"""``<|channel|>commentary to=functions.NAME ...<|message|>{...}<|call|>``: gpt-oss (harmony)."""

import re

from ragkv.prompt.tools.calls import MISSING, AnyCall, InvalidToolCall, ToolFormat, named_call

_MESSAGE = re.compile(
    r"(?:<\|start\|>\s*assistant)?(?P<head>[^<]*<\|channel\|>.*?)<\|message\|>"
    r"(?P<body>.*?)(?P<end><\|call\|>|<\|end\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_TO = re.compile(r"to=functions\.([^\s<]+)")


def parse(text: str) -> tuple[str, list[AnyCall]]:
    """Read the messages: the final channel's are the text, those to a function are calls.

    What the model thinks aloud, in the other channels, is dropped.
    """
    messages = list(_MESSAGE.finditer(text))
    if not messages:
        return text, []
    calls, content = list[AnyCall](), list[str]()
    for message in messages:
        called = _TO.search(message["head"])
        body = message["body"].strip()
        if called is not None and not body and not message["end"]:
            calls.append(InvalidToolCall(message[0], MISSING, called[1]))
        elif called is not None:
            calls.append(named_call(called[1], body))
        elif "final" in message["head"]:
            content.append(message["body"])
    return "".join(content), calls


FORMAT = ToolFormat(
    "gpt_oss",
    lambda template: "to=functions." in template,
    ("<|channel|>", "<|start|>"),
    parse,
    ("<|message|>", "<|call|>", "<|end|>", "<|return|>", "<|constrain|>"),
    openings=("<|channel|>commentary to=functions.",),
    first=0,
)
