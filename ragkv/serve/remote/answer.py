"""A prompt as the body of a request, and the events of its answer as a Completion."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from ragkv.config import DecodeConfig, ReuseConfig
from ragkv.errors import ConfigError, ServerError
from ragkv.prompt.chat import Chat
from ragkv.prompt.tools.calls import InvalidToolCall, ToolCall, named_call
from ragkv.report.account import ReuseReport
from ragkv.serve.remote.connection import Connection

if TYPE_CHECKING:
    from ragkv.answer.completion import Completion

Prompt = str | Sequence[Mapping[str, Any]]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GENERATION_FIELDS = ("repetition_penalty", "min_p")
_ALWAYS = ("temperature", "top_p")
_WHERE_GIVEN = ("top_k", "stop_token_ids")


def path_of(prompt: str | Chat) -> str:
    """Return the path that answers a text, or chat messages."""
    return TEXT if isinstance(prompt, str) else CHAT


def body_of(
    prompt: str | Chat, decode: DecodeConfig, reuse: Mapping[str, Any], model: str
) -> dict[str, Any]:
    """Return the body of a request for an answer in events.

    Parameters
    ----------
    reuse
        Fields of ReuseConfig, in JSON's types.

    Raises
    ------
    ConfigError
        A setting is the server's to make, or a variable of the chat template is no JSON.
    """
    if decode.prompt_lookup_num_tokens is not None:
        raise ConfigError(
            "prompt_lookup_num_tokens cannot be set for an answer of a server: omit it"
        )
    if isinstance(prompt, str):
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": decode.max_new_tokens}
        if decode.logprobs is not None:
            raise ConfigError("logprobs of a server are for chat messages alone: omit it")
    else:
        body = _chat(prompt) | {"max_completion_tokens": decode.max_new_tokens}
        if decode.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": decode.logprobs}
    if decode.json_schema is not None:
        schema = dict(decode.json_schema)
        named = {"name": "answer", "schema": schema, "strict": schema.get("strict") is True}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    body |= {name: getattr(decode, name) for name in _ALWAYS}
    body |= {name: value for name in _WHERE_GIVEN if (value := getattr(decode, name))}
    if decode.stops:
        body["stop"] = list(decode.stops)
    if decode.seed is not None:
        body["seed"] = decode.seed
    if decode.ignore_eos:
        body["ignore_eos"] = True
    return {
        **body,
        **_generation(decode),
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ragkv": {**reuse, "report": True},
    }


def _generation(decode: DecodeConfig) -> dict[str, Any]:
    generation = dict(decode.generation or {})
    if beyond := ", ".join(generation.keys() - set(GENERATION_FIELDS)):
        raise ConfigError(
            f"{beyond} cannot be set for an answer of a server, which takes "
            f"{' and '.join(GENERATION_FIELDS)}: omit it"
        )
    return generation


def _chat(chat: Chat) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": list(map(_message, chat))}
    if chat.tools:
        body |= {"tools": list(chat.tools), "tool_choice": _choice(chat)}
        if not chat.parallel_tool_calls:
            body["parallel_tool_calls"] = False
    if chat.chat_template_kwargs:
        try:
            json.dumps(chat.chat_template_kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"chat_template_kwargs for a server must be JSON: {error}") from None
        body["chat_template_kwargs"] = chat.chat_template_kwargs
    return body


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's form: arguments of calls are JSON."""
    calls = message.get("tool_calls") or ()
    written = [
        {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}
        for call in calls
        for function in (call["function"],)
    ]
    return {**message, "tool_calls": written} if written else dict(message)


def contains(prompt: Prompt, text: str) -> bool:
    """Return whether a prompt has a chunk verbatim."""
    if isinstance(prompt, str):
        return text in prompt
    contents = (message.get("content") or "" for message in prompt)
    return any(
        text in (part if isinstance(part, str) else str(part.get("text")))
        for content in contents
        for part in ([content] if isinstance(content, str) else content)
    )


def _choice(chat: Chat) -> object:
    word = {"any": "required"}.get(chat.tool_choice, chat.tool_choice)
    if word not in ("auto", "none", "required"):
        return {"type": "function", "function": {"name": word}}
    if word == "none" or chat.allowed_tools is None:
        return word
    tools = [{"type": "function", "function": {"name": name}} for name in chat.allowed_tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": word, "tools": tools}}


def reuse_fields(own: ReuseConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a request says about reuse: what differs from the defaults, and ``overrides``.

    Raises
    ------
    ConfigError
        An override is unknown or wrong, or a method is not a name.
    """
    usual, config = ReuseConfig(), own.override(**overrides)
    return {
        each.name: _plain(each.name, getattr(config, each.name))
        for each in fields(config)
        if each.name in overrides or getattr(config, each.name) != getattr(usual, each.name)
    }


def _plain(name: str, value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type) and name != "method":
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(f"a server takes the name of a method, not {value!r}: put it there first")


async def tokens_of(connection: Connection, text: str) -> list[int]:
    """Return a text's tokens, within the loop; what a prompt of no text has is no part of them."""
    none, found = [
        (await connection.request("POST", "/tokenize", json={"prompt": each}))["tokens"]
        for each in ("", text)
    ]
    return list(map(int, found[len(none) :] if found[: len(none)] == none else found))


class Events:
    """Collects an answer from the events of its stream."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._text: list[str] = []
        self._finish_reason: Any = "stop"
        self._report: object = None
        self._calls: list[dict[str, str]] = []
        self._logprobs: list[Mapping[str, Any]] = []
        self.token_ids: list[int] = []

    def feed(self, event: Mapping[str, Any]) -> str:
        """Take an event; return its text."""
        self._report = event.get("ragkv") or self._report
        piece = ""
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            piece += choice.get("text") or delta.get("content") or ""
            self._logprobs += (choice.get("logprobs") or {}).get("content") or ()
            for call in delta.get("tool_calls") or ():  # each comes whole
                self._calls.append({**call["function"], "call_id": call["id"]})
            self.token_ids += choice.get("token_ids") or ()
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        self._text.append(piece)
        return piece

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._text)

    def completion(self) -> Completion:
        """Return the whole answer.

        Raises
        ------
        ServerError
            The server sent no report of ragkv.
        """
        from ragkv.answer.completion import Completion

        if not isinstance(self._report, Mapping):
            raise ServerError(
                f"{self._address} sends no report of ragkv: the client needs `ragkv serve`, and "
                "that with reports"
            )
        report = ReuseReport.from_dict(self._report)
        calls = [named_call(**call) for call in self._calls]
        return Completion(
            self.text,
            self.token_ids,
            report,
            finish_reason="stop" if self._finish_reason == "tool_calls" else self._finish_reason,
            tool_calls=tuple(call for call in calls if isinstance(call, ToolCall)),
            invalid_tool_calls=tuple(call for call in calls if isinstance(call, InvalidToolCall)),
            text_logprobs=tuple(self._logprobs),
        )
