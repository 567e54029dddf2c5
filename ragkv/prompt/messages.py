"""Normalisation of chat messages to the form that chat templates read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ragkv.errors import ConfigError

Message = Mapping[str, Any]
_FORM = "prompt must be a string or a list of {'role', 'content'} messages"
_ROLES = {"developer": "system", "function": "tool"}
"""OpenAI's newer name of one role, and the older name of another."""
_PART_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of textual content, and the field with the text."""
_SILENT_PARTS = (
    *("reasoning", "thinking", "redacted_thinking", "tool_call", "tool_use", "function_call"),
    *("tool_call_chunk", "invalid_tool_call", "server_tool_call"),
)
"""Types of content that do not belong to an earlier answer's text."""


def normal_messages(messages: object) -> tuple[Message, ...]:
    """Return messages with text as content, objects as arguments, and results that name calls.

    The parts of content are joined to one text, empty for an answer or a result without content.
    The arguments of a call become an object, from JSON if necessary; missing or null ones an empty
    object. Every call gets an id, and a tool's result the id and the name of its call if there is
    one. Fields that are None are dropped. The function is idempotent.

    Raises
    ------
    ConfigError
        The input is not a list of messages, content is not text, or arguments are not an object.
        The error names the message and the call.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise ConfigError(_FORM)
    found = tuple(_normal(message, at) for at, message in enumerate(messages))
    _name_calls(found)
    return found


def text_of(content: object) -> str:
    """Return content as one text.

    Raises
    ------
    ConfigError
        A part is not text; the error names its type.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ConfigError(f"content must be a text or a list of parts, not {content!r:.80}")
    return "".join(map(_part_text, content))


def arguments_of(given: object) -> dict[str, Any]:
    """Return a call's arguments from an object or its JSON; missing or null ones are empty.

    Raises
    ------
    ConfigError
        They have a different form.
    """
    read = given
    if isinstance(given, str):
        try:
            read = json.loads(given) if given.strip() else None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"arguments are not JSON ({error}): {given!r:.80}") from None
    if read is None:
        return {}
    if not isinstance(read, Mapping):
        raise ConfigError(f"arguments must be a JSON object, not {given!r:.80}")
    check_json("arguments", read)
    return dict(read)


def check_json(name: str, value: object) -> None:
    """Check that a value is JSON; templates write the type names of other values.

    Raises
    ------
    ConfigError
        It contains e.g. a date or a set.
    """
    try:
        json.dumps(value, default=_json_of)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must be JSON: {error}") from None


def _json_of(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r:.80} is of the type {type(value).__name__}")


def short_id(text: str) -> str:
    """Return an id of nine letters and digits for a call's id."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:9]


def _normal(message: Any, at: int) -> dict[str, Any]:
    if hasattr(message, "model_dump"):  # OpenAI's package has answers as such objects
        message = message.model_dump()
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(_FORM)
    out = {name: value for name, value in message.items() if value is not None}
    out["role"] = _ROLES.get(out["role"], out["role"])
    calls = out.pop("tool_calls", None) or ()
    if "function_call" in out:  # the older form of one
        calls = [*calls, {"type": "function", "function": out.pop("function_call")}]
    if out["role"] not in ("assistant", "tool") and "content" not in message and not calls:
        raise ConfigError(_FORM)
    try:
        out["content"] = text_of(out.get("content", ""))
    except ConfigError as error:
        raise ConfigError(f"messages[{at}]: {error}") from None
    if not isinstance(calls, list | tuple):
        raise ConfigError(f"messages[{at}]: tool_calls must be a list, not {calls!r:.80}")
    if calls:
        out["tool_calls"] = [_call(call, at, which) for which, call in enumerate(calls)]
    return out


def _call(call: object, at: int, which: int) -> dict[str, Any]:
    place = f"messages[{at}].tool_calls[{which}]"
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise ConfigError(f"{place}: a tool call must have a function's name, not {call!r:.80}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{place}: a tool call must have a function's name, not {name!r:.80}")
    try:
        arguments = arguments_of(function.get("arguments"))
    except ConfigError as error:
        raise ConfigError(f"{place}, a call of {name!r}: {error}") from None
    # a stream's index is no part of a call
    kept = {key: value for key, value in call.items() if value is not None and key != "index"}
    kept["id"] = str(kept.get("id") or short_id(f"{at}.{which}"))
    return {**kept, "function": {**function, "name": name, "arguments": arguments}}


def _name_calls(messages: Iterable[dict[str, Any]]) -> None:
    """Give each result the id and the name of the call with its id, or else of the next call."""
    known: dict[str, Message] = {}
    waiting: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls", ())
        known |= {call["id"]: call for call in calls}
        waiting += calls
        if message["role"] != "tool":
            continue
        given = {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}
        if "tool_call_id" in given:
            call = known.get(str(given["tool_call_id"]))
        else:
            named = (each for each in waiting if given.get("name", _name(each)) == _name(each))
            call = next(named, None)
        if call is not None:
            waiting = [each for each in waiting if each is not call]
            message.update({"tool_call_id": call["id"], "name": _name(call), **given})


def _name(call: Message) -> str:
    return str(call["function"]["name"])


def _part_text(part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind not in (*_PART_TEXTS, *_SILENT_PARTS):
        raise ConfigError(f"content of type {kind!r} is not read: give its text")
    if kind in _SILENT_PARTS:
        return ""
    text = part.get(_PART_TEXTS[kind])
    if not isinstance(text, str):
        raise ConfigError(f"content of type {kind!r} must have a text, not {text!r:.80}")
    return text


def parts_of(messages: Iterable[Message]) -> Iterator[dict[str, Any]]:
    """Yield messages whose content is a list with one text part."""
    for message in messages:
        yield {**message, "content": [{"type": "text", "text": message["content"]}]}
