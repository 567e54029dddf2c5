"""Tool calls, as an answer contains them."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

ID_CHARS = 9
"""Letters and digits of a call's id: Mistral's chat template takes no others."""


def new_id() -> str:
    """Return a call's id."""
    return uuid.uuid4().hex[:ID_CHARS]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model: the tool's name, and arguments by name."""

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default_factory=new_id)


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """What stands where a call should, and cannot be made.

    Attributes
    ----------
    text
        As the model wrote it, without the marks around it; its arguments alone where the name
        can be read.
    error
        What is wrong with it.
    name
        The tool's name; empty where none can be read.
    """

    text: str
    error: str
    name: str = ""
    id: str = field(default_factory=new_id)


AnyCall = ToolCall | InvalidToolCall


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of tool calls in one family of chat templates.

    Attributes
    ----------
    suits
        Whether a chat template uses the format.
    marks
        Texts at the beginning of calls, some of them special tokens; ``{`` counts only at the
        beginning of the answer.
    parse
        Returns the text and the calls of a whole answer; it never raises.
    inner_marks
        Texts within and after calls that can be special tokens.
    openings
        Beginnings of an answer that is a call; None for the marks.
    """

    name: str
    suits: Callable[[str], bool]
    marks: tuple[str, ...]
    parse: Callable[[str], tuple[str, list[AnyCall]]]
    inner_marks: tuple[str, ...] = ()
    openings: tuple[str, ...] | None = None


def call_of(text: str, arguments: Iterable[str] = ("arguments", "parameters")) -> AnyCall:
    """Read one JSON object with a name and arguments.

    Parameters
    ----------
    arguments
        Names of the member that has the arguments; without any of them there are none.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _begun_call(text, f"it is not JSON: {error}")
    return call_from(found, text, arguments)


_BEGUN = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]+)"'
    r'(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(\S.*))?',
    re.DOTALL,
)
"""A call's name and, where they have begun, its arguments."""

MISSING = "its arguments are missing"
"""The error of a call that was not begun but for its name."""


def _begun_call(text: str, error: str) -> AnyCall:
    """Return a call that is cut off, or followed by something else, as far as it can be read."""
    begun = _BEGUN.match(text)
    if begun is None:
        return InvalidToolCall(text.strip(), error)
    name, arguments = begun.groups()
    if arguments is None:
        return InvalidToolCall(text.strip(), MISSING, name)
    try:
        found, _ = json.JSONDecoder().raw_decode(arguments)
    except (ValueError, RecursionError):
        return InvalidToolCall(arguments, "its arguments are cut off, or not JSON", name)
    return call_from({"name": name, "arguments": found}, text)


def call_from(
    found: object, text: str, arguments: Iterable[str] = ("arguments", "parameters")
) -> AnyCall:
    """Return the call that a JSON value is, as :func:`call_of` does."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return InvalidToolCall(text.strip(), "it has no name of a tool")
    given: object = next((found[name] for name in arguments if name in found), {})
    if isinstance(given, str):  # JSON in JSON, as OpenAI writes it
        return named_call(found["name"], given)
    if not isinstance(given, dict):
        return InvalidToolCall(json.dumps(given), "its arguments are no object", found["name"])
    return ToolCall(found["name"], given)


def named_call(name: str, arguments: str, call_id: str | None = None) -> AnyCall:
    """Return a call whose arguments are written as JSON; no text is no arguments."""
    call_id = call_id or new_id()
    try:
        given = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        return InvalidToolCall(arguments, f"its arguments are not JSON: {error}", name, call_id)
    if not isinstance(given, dict):
        return InvalidToolCall(arguments, "its arguments are no object", name, call_id)
    if not name:
        return InvalidToolCall(arguments, "it has no name of a tool", id=call_id)
    return ToolCall(name, given, call_id)


def last_with(calls: Sequence[InvalidToolCall], error: str) -> tuple[InvalidToolCall, ...]:
    """Return the calls, the last one with another error: why its answer ended before it."""
    return (*calls[:-1], *(replace(call, error=error) for call in calls[-1:]))


def calls_in_list(text: str) -> list[AnyCall]:
    """Read a JSON list of calls; the last one may be cut off."""
    rest, calls = text.strip(), list[AnyCall]()
    if not rest.startswith("["):
        return [call_of(rest)]
    rest = rest[1:].lstrip()
    while rest and not rest.startswith("]"):
        try:
            found, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return [*calls, call_of(rest)]
        calls.append(call_from(found, rest[:end]))
        rest = rest[end:].lstrip(", \n\t\r")
    return calls
