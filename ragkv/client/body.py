"""The body of a request for an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ragkv.config import DecodeConfig, ReuseConfig
from ragkv.errors import ConfigError
from ragkv.prompt.chat import Chat, TokenIds

Prompt = str | Sequence[Mapping[str, Any]] | TokenIds
GENERATION_FIELDS = ("repetition_penalty", "min_p")


def body_of(
    prompt: str | Chat | TokenIds, decode: DecodeConfig, reuse: Mapping[str, Any], model: str
) -> dict[str, Any]:
    """Return the body of a request for a streamed answer.

    Parameters
    ----------
    reuse
        Fields of ReuseConfig, in JSON's types.

    Raises
    ------
    ConfigError
        A server does not take the setting, or a variable of the chat template is not JSON.
    """
    if not decode.drafts:
        raise ConfigError("drafts cannot be switched off for an answer of a server: omit it")
    if not isinstance(decode.sparse, str):
        raise ConfigError("a server takes sparse='off' or 'auto', not a SparseDecoding")
    generation = dict(decode.generation or {})
    if beyond := ", ".join(generation.keys() - set(GENERATION_FIELDS)):
        raise ConfigError(
            f"a server does not take {beyond}, only {' and '.join(GENERATION_FIELDS)}: omit it"
        )
    if isinstance(prompt, Chat):
        body = _chat(prompt) | {"max_completion_tokens": decode.max_new_tokens}
        if decode.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": decode.logprobs}
    else:
        text_or_ids = prompt if isinstance(prompt, str) else list(prompt.ids)
        body = {"prompt": text_or_ids, "max_tokens": decode.max_new_tokens}
        if decode.logprobs is not None:
            raise ConfigError("a server returns logprobs for chat messages only: omit it")
    if decode.json_schema is not None:
        schema = dict(decode.json_schema)
        named = {"name": "answer", "schema": schema, "strict": schema.get("strict") is True}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    optional = {
        "top_k": decode.top_k or None,
        "stop": list(decode.stops) or None,
        "stop_token_ids": decode.stop_token_ids or None,
        "ignore_eos": decode.ignore_eos or None,
        "sparse": None if decode.sparse == "off" else decode.sparse,
        "seed": decode.seed,
        **generation,
    }
    return {
        **body,
        **{name: value for name, value in optional.items() if value is not None},
        "temperature": decode.temperature,
        "top_p": decode.top_p,
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ragkv": {**reuse, "report": True},
    }


def _chat(chat: Chat) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": list(chat)}
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


def _choice(chat: Chat) -> object:
    word = {"any": "required"}.get(chat.tool_choice, chat.tool_choice)
    if word not in ("auto", "none", "required"):
        return {"type": "function", "function": {"name": word}}
    if word == "none" or chat.allowed_tools is None:
        return word
    tools = [{"type": "function", "function": {"name": name}} for name in chat.allowed_tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": word, "tools": tools}}


def contains(prompt: str | Chat | TokenIds, text: str) -> bool:
    """Whether a prompt contains a chunk verbatim; False for token ids, unknown text here."""
    if isinstance(prompt, TokenIds):
        return False
    texts = [prompt] if isinstance(prompt, str) else [each["content"] for each in prompt]
    return any(text in each for each in texts)


def reuse_fields(own: ReuseConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's settings of reuse: differences from the defaults, and ``overrides``.

    Raises
    ------
    ConfigError
        An override is unknown or wrong, or the method is not a name.
    """
    config = own.override(**overrides)
    if not isinstance(config.method, str):
        raise ConfigError(f"a server takes the name of a method, not {config.method!r}")
    default = asdict(ReuseConfig())
    return {
        name: value
        for name, value in asdict(config).items()
        if name in overrides or value != default[name]
    }
