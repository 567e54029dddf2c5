"""Prompts and settings as the body of a request."""

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
_WHERE_GIVEN = ("top_k", "stop_token_ids", "ignore_eos")


def body_of(
    prompt: str | Chat | TokenIds, decode: DecodeConfig, reuse: Mapping[str, Any], model: str
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
    if not decode.drafts:
        raise ConfigError("drafts cannot be switched off for an answer of a server: omit it")
    if not isinstance(decode.sparse, str):
        raise ConfigError("an answer of a server takes sparse='off' or 'auto', no SparseDecoding")
    if not isinstance(prompt, Chat):
        asked = prompt if isinstance(prompt, str) else list(prompt.ids)
        body: dict[str, Any] = {"prompt": asked, "max_tokens": decode.max_new_tokens}
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
    generation = dict(decode.generation or {})
    if beyond := ", ".join(generation.keys() - set(GENERATION_FIELDS)):
        raise ConfigError(
            f"{beyond} cannot be set for an answer of a server, which takes "
            f"{' and '.join(GENERATION_FIELDS)}: omit it"
        )
    given = {name: value for name in _WHERE_GIVEN if (value := getattr(decode, name))}
    given |= {"stop": list(decode.stops)} if decode.stops else {}
    given |= {} if decode.sparse == "off" else {"sparse": decode.sparse}
    given |= {} if decode.seed is None else {"seed": decode.seed}
    return {
        **body,
        **given,
        **generation,
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
    """Return whether a prompt has a chunk verbatim; what token ids say is not known here."""
    if isinstance(prompt, TokenIds):
        return False
    texts = [prompt] if isinstance(prompt, str) else [each["content"] for each in prompt]
    return any(text in each for each in texts)


def reuse_fields(own: ReuseConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a request says about reuse: what differs from the defaults, and ``overrides``.

    Raises
    ------
    ConfigError
        An override is unknown or wrong, or a method is not a name.
    """
    config = own.override(**overrides)
    if not isinstance(config.method, str):
        raise ConfigError(f"a server takes the name of a method, not {config.method!r}")
    usual = asdict(ReuseConfig())
    return {
        name: value
        for name, value in asdict(config).items()
        if name in overrides or value != usual[name]
    }
